"""The server: who may ask, what is streamed, and what a client that leaves stops."""

from __future__ import annotations

from .mutation import mutation as m

MUTATIONS = (
    m(
        "server/guards.py",
        "found = [hmac.compare_digest(text, key) for key in self._keys for text in both]",
        "found = [key.startswith(text) for key in self._keys for text in both]",
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
        "    pieces = stream.take(choice.finished, last)",
        "    pieces = stream.take(False, last)",
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
        "server/metrics.py",
        "self.drafts[self.ready.proposers[news.offerer]].count_offer(news.offered)",
        "self.drafts[self.ready.proposers[news.proposer]].count_offer(news.offered)",
        "test_server_access.py::test_offers_are_counted_by_proposer_and_position",
    ),
    m(
        "engine/landing.py",
        "self.names[offerer] if offered else None",
        "self.names[0] if offered else None",
        "test_landing.py::test_a_draft_is_its_proposer_s_and_the_rest_the_target_s",
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
    m(
        "server/prompts.py",
        "return [ids[0], *ids[1 - size :]] if added else ids[-size:]",
        "return ids[-size:]",
        "test_server_requests.py",
    ),
    m(
        "server/service.py",
        "if request.request_id is not None and not http.scope.get(ID_GIVEN):",
        "if request.request_id is not None:",
        "test_server_requests.py",
    ),
    m(
        "server/translating.py",
        'if last.get("role") != "assistant" or any(name in last for name in without):',
        'if last.get("role") != "assistant":',
        "test_server_blocks.py",
    ),
    m(
        "server/blocks.py",
        "        if not self._is_open or self.blocks[-1].kind != kind:",
        "        if not self._is_open:",
        "test_server_blocks.py",
    ),
    m(
        "server/generation.py",
        "        return sum(kept) / len(kept) if kept else -math.inf",
        "        return sum(kept)",
        "test_server.py::test_the_best_of_many_have_the_highest_mean_logprobs",
    ),
    m(
        "server/call_parser.py",
        "self._listed, self._last = False, True",
        "self._listed = False",
        "test_tool_grammars.py",
    ),
    m(
        "server/json_end.py",
        "elif self._closing.startswith(text[place:]) and not final:",
        "elif False:",
        "test_answer_parser.py",
    ),
    m(
        "server/service.py",
        "style.behind_reasoning(wanted, prompt)",
        "wanted",
        "test_chat_style.py",
    ),
    m(
        "server/tool_choice.py",
        'head = f"{name}: {before} {self._marker(opening)} | {name}_spelled"',
        'head = f"{name}: {before} {self._marker(opening)}"',
        "test_tool_grammars.py",
    ),
)
