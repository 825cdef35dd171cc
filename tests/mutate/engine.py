"""The engine: who takes part, the KV, the tokens, and the text made of them."""

from __future__ import annotations

from .mutation import mutation as m

MUTATIONS = (
    # --- who takes part in a round ----------------------------------------------------------------
    m(
        "engine/gathering.py",
        "        if self.scheduler.waiting:\n            left",
        "        if self.scheduler.waiting and not in_flight:\n            left",
        "test_loop.py",
    ),
    m(
        "engine/gathering.py",
        "            >= request.max_length\n",
        "            > request.max_length\n",
        "test_loop.py",
    ),
    m(
        "engine/gathering.py",
        "return max(1, min(self.most_rows - count, self.longest_chunk(count)))",
        "return max(1, self.most_rows - count)",
        "test_loop.py",
    ),
    m(
        "engine/gathering.py",
        "            if not any(request in batch.group.requests for batch in in_flight)\n",
        "",
        "test_structured.py",
    ),
    m(
        "engine/scheduler.py",
        "request = max(self.running, key=self._arrival)",
        "request = min(self.running, key=self._arrival)",
        "test_scheduler.py",
    ),
    m(
        "engine/scheduler.py",
        "        self.waiting.appendleft(request)",
        "        self.waiting.append(request)",
        "test_scheduler.py",
    ),
    m(
        "engine/scheduler.py",
        "            if promised + missing > self.kv.pool.num_free:",
        "            if missing > self.kv.pool.num_free:",
        "test_scheduler.py",
    ),
    m(
        "engine/scheduler.py",
        "            rows -= request.length - request.computed",
        "            rows -= 1",
        "test_scheduler.py",
    ),
    m(
        "engine/scheduler.py",
        "        self.waiting.extendleft(reversed(skipped))",
        "        self.waiting.extendleft(skipped)",
        "test_scheduler.py",
    ),
    m(
        "engine/scheduler.py",
        "            self.running.sort(key=self._arrival)",
        "            pass",
        "test_scheduler.py",
    ),
    m(
        "engine/loop.py",
        "                if reach is None and decision.drafts:",
        "                if False:",
        "test_landing.py",
        "test_loop.py",
    ),
    m(
        "engine/reserving.py",
        "decoding = self.computed[slots] < self.last_part[slots]",
        "decoding = self.computed[slots] <= self.limit[slots]",
        "test_landing.py",
    ),
    m(
        "engine/reserving.py",
        "        self.reach[slots] -= rows",
        "        pass",
        "test_landing.py",
    ),
    m(
        "engine/reported.py",
        "            chances = np.concatenate((chances, unknown))",
        "            chances = np.concatenate((chances, np.zeros_like(unknown)))",
        "test_reported.py",
    ),
    m(
        "engine/reported.py",
        "        self._chances[slot] = np.nan",
        "        pass",
        "test_reported.py",
    ),
    m(
        "engine/reported.py",
        "        known = (slots >= 0) & (rows[:, columns.COUNT] > 0)",
        "        known = slots >= 0",
        "test_reported.py",
    ),
    m(
        "engine/batch.py",
        "        ending = min(self.ending, len(self.chunks) - 1)",
        "        ending = self.ending",
        "test_landing.py",
    ),
    m(
        "engine/loop.py",
        "scheduler, kv, self.controller.active, state.max_drafts",
        "scheduler, kv, dict(enumerate(self.controller.names)), state.max_drafts",
        "test_faults.py::test_without_a_drafter_that_failed_texts_go_on",
    ),
    m(
        "engine/engine.py",
        "            request.drafters -= set(failed)",
        "            pass",
        "test_faults.py::test_without_a_drafter_that_failed_texts_go_on",
    ),
    # --- KV ---------------------------------------------------------------------------------------
    m(
        "kv/transaction.py",
        "while len(lease.blocks) > before:",
        "while False:",
        "test_kv.py",
    ),
    m(
        "kv/transaction.py",
        "for start in range(0, len(tokens) - self.block_size, self.block_size):",
        "for start in range(0, len(tokens) - self.block_size + 1, self.block_size):",
        "test_kv.py",
    ),
    m(
        "kv/transaction.py",
        "        while (len(blocks) - 1) * self.block_size >= lease.committed:",
        "        while (len(blocks) - 1) * self.block_size > lease.committed:",
        "test_kv.py",
    ),
    m(
        "kv/transaction.py",
        "        for block in reversed(lease.blocks):",
        "        for block in lease.blocks:",
        "test_kv.py",
    ),
    m(
        "kv/transaction.py",
        "        if sum(count for count in missing.values() if count > 0) > kv.pool.num_free:",
        "        if max(missing.values()) > kv.pool.num_free:",
        "test_kv.py",
    ),
    m(
        "kv/block_pool.py",
        "digest = hashlib.blake2b(parent, digest_size=16)",
        'digest = hashlib.blake2b(b"", digest_size=16)',
        "test_kv.py",
    ),
    m(
        "kv/block_pool.py",
        "return block if block is not None and drafters <= self._drafters[block] else None",
        "return block",
        "test_kv.py",
    ),
    m(
        "kv/block_pool.py",
        "                self._free.move_to_end(block, last=False)",
        "                pass",
        "test_kv.py",
    ),
    m(
        "engine/landing.py",
        "    kv.keep(lease, settled)",
        "    kv.keep(lease, [*settled[1:], *tokens[-1:]])",
        "test_landing.py",
    ),
    m(
        "engine/landing.py",
        "    drafts = min(accepted, count) if verified else 0",
        "    drafts = accepted if verified else 0",
        "test_landing.py",
    ),
    # --- tokens -----------------------------------------------------------------------------------
    m(
        "engine/engine.py",
        "seed = leader.seed if leader is not None else secrets.randbelow(MAX_SEED)",
        "seed = leader.seed if leader is not None else 0",
        "test_loop.py::test_choices_of_a_prompt_share_a_seed_that_no_other_has",
    ),
    m(
        "engine/engine.py",
        "seed = leader.seed if leader is not None else secrets.randbelow(MAX_SEED)",
        "seed = secrets.randbelow(MAX_SEED)",
        "test_loop.py::test_choices_of_a_prompt_share_a_seed_that_no_other_has",
    ),
    m(
        "sampling/noise.py",
        "(quads, rows[0] & _MASK, rows[1] & _MASK, zero)",
        "(quads, rows[0] & _MASK, zero, zero)",
        "test_sampling.py",
    ),
    m(
        "sampling/noise.py",
        "zero), (rows[2] & _MASK, (rows[2] >> 32) & _MASK)",
        "zero), (rows[2] & _MASK, rows[2] & 0)",
        "test_sampling.py",
    ),
    m(
        "sampling/sampler.py",
        "return logits - params.presence[slots].unsqueeze(1) * (counts > 0)",
        "return logits - params.presence[slots].unsqueeze(1) * (seen > 0)",
        "test_sampling.py",
    ),
    m(
        "sampling/sampler.py",
        "early = (rows.positions < params.min_length[rows.slots]).unsqueeze(1)",
        "early = (rows.positions <= params.min_length[rows.slots]).unsqueeze(1)",
        "test_sampling.py",
    ),
    m(
        "kernels/logprobs.py",
        "ranks = (logits > chosen).sum(dim=-1, keepdim=True) + 1",
        "ranks = (logits >= chosen).sum(dim=-1, keepdim=True) + 1",
        "test_sampling.py",
    ),
    m(
        "kernels/logprobs.py",
        "ranks = (logits > chosen).sum(dim=-1, keepdim=True) + 1",
        "ranks = (logits > chosen).sum(dim=-1, keepdim=True)",
        "test_sampling.py",
    ),
    m(
        "engine/structured.py",
        "    for node in range(length):\n        path",
        "    for node in range(0):\n        path",
        "test_structured.py::test_offers_are_cut_before_the_first_draft_that_is_forbidden",
    ),
    # --- text -------------------------------------------------------------------------------------
    m(
        "engine/output.py",
        "            for size in range(min(len(stop) - 1, length), held, -1):",
        "            for size in range(min(len(stop) - 2, length), held, -1):",
        "test_server_stream.py",
    ),
    m(
        "engine/output.py",
        "        if not final and self._stops:",
        "        if self._stops:",
        "test_server_stream.py",
    ),
    m(
        "engine/output.py",
        "        if not final and self._stops:",
        "        if False:",
        "test_server_stream.py",
    ),
    m(
        "engine/output.py",
        "            at, _, stop = min(found)",
        "            at, _, stop = found[0]",
        "test_output.py",
    ),
    m(
        "engine/output.py",
        "(at, -len(stop), stop)",
        "(at, len(stop), stop)",
        "test_output.py",
    ),
    m(
        "engine/output.py",
        "if (at := self.text.find(stop, max(0, before - len(stop) + 1))) >= 0",
        "if (at := self.text.find(stop, before)) >= 0",
        "test_server_stream.py",
    ),
    m(
        "engine/output.py",
        "            if self._stops and self.kept > params.min_tokens:",
        "            if self._stops and self.kept >= params.min_tokens:",
        "test_llm.py::test_min_tokens_holds_stop_strings_back",
        "test_llm.py::test_a_stop_string_within_min_tokens_stops_nothing_later",
    ),
    m(
        "engine/output.py",
        "            if self.stopped_by is not None:\n                return\n",
        "",
        "test_server_stream.py",
    ),
    m(
        "engine/output.py",
        "            if ends:\n                self.text += self._detokenizer.flush()\n",
        "",
        "test_server_stream.py",
    ),
)
