"""The server: who may ask, what is streamed, and what a client that leaves stops."""

from __future__ import annotations

from .mutation import mutation as m

MUTATIONS = (
    m(
        "server/guards.py",
        "found = [hmac.compare_digest(given, key) for key in self._keys]",
        "found = [key.startswith(given) for key in self._keys]",
        "test_server_stream.py::test_key_origin_and_size",
    ),
    m(
        "server/guards.py",
        'if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:',
        'if scope["type"] == "http" and not scope["path"].startswith(tuple(OPEN_PATHS)):',
        "test_server_stream.py::test_key_origin_and_size",
    ),
    m(
        "server/core.py",
        "            if not names:\n",
        "            if True:\n",
        "test_server_core.py::test_a_proposer_that_fails_is_switched_off_and_the_texts_go_on",
    ),
    m(
        "server/guards.py",
        "            if seen > self.limit:",
        "            if False:",
        "test_server_stream.py::test_key_origin_and_size",
    ),
    m(
        "server/answer.py",
        "    pieces = stream.take(final=choice.finished)",
        "    pieces = stream.take(final=False)",
        "test_server_stream.py",
    ),
    m(
        "server/answer.py",
        "        self._client.add_done_callback(self._gone)",
        "        pass",
        "test_server_stream.py::test_a_client_that_leaves_is_told_to_the_core_at_once",
    ),
    m(
        "server/generation.py",
        "            request.finish(FinishReason.STOP, self.stream.stopped_by)",
        "            pass",
        "test_server_stream.py",
    ),
    m(
        "server/front.py",
        "        if stopped:\n            self.core.send(Abort(stopped))",
        "",
        "test_server_stream.py",
    ),
    m(
        "server/front.py",
        "        if ids and self.dead is None:\n            self.core.send(Abort(ids))",
        "",
        "test_server_stream.py",
    ),
    m(
        "server/generation.py",
        "self.draft_positions += [*range(1, news.accepted + 1), *own]",
        "self.draft_positions += [*range(news.accepted), *own]",
        "test_server_units.py::test_places_of_tokens_in_their_drafts",
    ),
    m(
        "server/logprobs.py",
        "    ranked.append((score.token_id, score.logprob, score.rank))",
        "    ranked.append((score.token_id, score.logprob, len(ranked) + 1))",
        "test_server_units.py::test_ranks_of_prompt_tokens",
    ),
    m(
        "server/logprobs.py",
        "for rank, (token, value) in enumerate(score.top, start=1)]",
        "for rank, (token, value) in enumerate(score.top, start=0)]",
        "test_server_units.py::test_ranks_of_prompt_tokens",
    ),
    m(
        "server/logprobs.py",
        "        self._at += len(self._detokenizer.push(token))",
        "        self._at += len(self._detokenizer.push(token).encode())",
        "test_server.py",
        "test_server_units.py",
    ),
)
