"""Drafts: who makes them, what they are worth, what they cost, which are verified and accepted."""

from __future__ import annotations

from .mutation import mutation as m

MUTATIONS = (
    # --- what rounds cost -------------------------------------------------------------------------
    m(
        "speculation/costs.py",
        "return drafts, scale * (seconds + proposing)",
        "return drafts, scale * seconds",
        "test_round_costs.py",
    ),
    m(
        "speculation/costs.py",
        "return drafts, np.array([scale * (self._forward_of(rows)[0] + proposing)])",
        "return drafts, np.array([scale * self._forward_of(rows)[0]])",
        "test_round_costs.py",
    ),
    m(
        "speculation/costs.py",
        "guess = times * (own.seconds + own.request_seconds * requests)",
        "guess = times * own.seconds",
        "test_round_costs.py",
    ),
    m(
        "speculation/costs.py",
        "seconds = self._forward(rows + drafts)",
        "seconds = self._forward(rows + 0 * drafts)",
        "test_round_costs.py",
    ),
    m(
        "speculation/costs.py",
        "rows = requests + prompt_rows + drafts",
        "rows = requests + prompt_rows",
        "test_round_costs.py",
    ),
    m(
        "speculation/costs.py",
        "weights[self._proposing_at[index]] = part / total",
        "weights[self._proposing_at[index]] = 0.0",
        "test_round_costs.py",
    ),
    m(
        "speculation/recorded_costs.py",
        "size = None if prompt_rows else self.size_for(requests, action, drafts, context)",
        "size = self.size_for(requests, action, drafts, context)",
        "test_round_costs.py",
    ),
    m(
        "speculation/recorded_costs.py",
        "if prompt_rows or not len(places):",
        "if not len(places):",
        "test_round_costs.py",
    ),
    m(
        "speculation/recorded_costs.py",
        "features[place, 2 + _OCTAVES] = size.action[1] > 0",
        "features[place, 2 + _OCTAVES] = 0.0",
        "test_round_costs.py",
    ),
    m(
        "speculation/recorded_costs.py",
        "if wanted.issubset(each[0]))",
        "if not each[0])",
        "test_round_costs.py",
    ),
    m(
        "speculation/planner.py",
        "        if not s.prompt_rows:\n            sample",
        "        if True:\n            sample",
        "test_decisions.py::test_rounds_with_prompts_teach_nothing_of_the_host",
    ),
    # --- how many are verified --------------------------------------------------------------------
    m(
        "speculation/goodput.py",
        "MIN_PACE = 0.95",
        "MIN_PACE = 0.9",
        "test_goodput.py",
    ),
    m(
        "speculation/goodput.py",
        "        rates[best] = 0.0\n    return 0",
        "        return best\n    return 0",
        "test_goodput.py",
    ),
    m(
        "speculation/goodput.py",
        "rates = (batch + gains[taken]) / (seconds - apart)",
        "rates = (batch + gains[taken]) / seconds",
        "test_goodput.py",
    ),
    m(
        "speculation/goodput.py",
        "rates[0] *= margin",
        "rates[0] *= 1.0",
        "test_goodput.py",
    ),
    m(
        "speculation/goodput.py",
        "held = chances if lasting is None else chances[lasting]",
        "held = chances",
        "test_goodput.py",
    ),
    m(
        "speculation/goodput.py",
        "return float((gains if lasting is None else gains[lasting]).min(initial=np.inf))",
        "return float((gains if lasting is None else gains[lasting]).mean())",
        "test_goodput.py",
    ),
    m(
        "speculation/goodput.py",
        "            fair *= 1.0 + _poorest(chances, ranked, count, lasting)",
        "            fair *= 1.0",
        "test_goodput.py",
    ),
    m(
        "speculation/offers.py",
        "        unfair = slower[best] > np.where(best > 0, fair, np.inf)",
        "        unfair = slower[best] > np.inf * fair",
        "test_offers.py",
    ),
    # --- trials -----------------------------------------------------------------------------------
    m(
        "speculation/planner.py",
        "drafts, seconds = self._verify(situation, action, chances, apart, beyond=drafts)",
        "drafts, seconds = self._verify(situation, action, chances, apart)",
        "test_decisions.py::test_a_trial_verifies_what_fairness_forbids",
    ),
    m(
        "speculation/planner.py",
        "at = min(max(most, at + 1), len(drafts) - 1)",
        "at = min(at, len(drafts) - 1)",
        "test_decisions.py::test_a_trial_verifies_what_fairness_forbids",
    ),
    m(
        "speculation/planner.py",
        "            self.budget.pay(expected.trial, took - without)",
        "            pass",
        "test_decisions.py::test_what_a_trial_lost_is_paid",
    ),
    m(
        "speculation/planner.py",
        "            self.budget.pay(expected.trial, took - usual)",
        "            pass",
        "test_decisions.py::test_what_a_trial_lost_is_paid",
    ),
    m(
        "speculation/planner.py",
        "        self._second = None\n        if trial is not None",
        "        if trial is not None",
        "test_decisions.py::test_a_trial_of_other_proposers_takes_two_rounds",
    ),
    m(
        "speculation/exploring.py",
        "SHARE = 0.005",
        "SHARE = 0.05",
        "test_planner.py::test_exploring_takes_a_small_part_of_the_time",
    ),
    m(
        "speculation/exploring.py",
        "self._credit[trial] = min(credit, _MOST)",
        "self._credit[trial] = credit",
        "test_decisions.py::test_credit_is_saved_up_and_owed_within_bounds",
    ),
    m(
        "speculation/exploring.py",
        "self._credit[trial] = min(max(credit, -_DEBT), _MOST)",
        "self._credit[trial] = credit",
        "test_decisions.py::test_credit_is_saved_up_and_owed_within_bounds",
    ),
    m(
        "speculation/exploring.py",
        "trial = min(due, key=lambda trial: self._tried.get(trial, 0))",
        "trial = due[0]",
        "test_decisions.py::test_trials_take_turns",
    ),
    m(
        "speculation/exploring.py",
        ">= _APART]",
        ">= 1]",
        "test_decisions.py::test_trials_take_turns",
    ),
    # --- who proposes -----------------------------------------------------------------------------
    m(
        "speculation/weighing.py",
        "if self._promises[other].rate > self.margin * self._promise_of(self.best).rate:",
        "if self._promises[other].rate < self.margin * self._promise_of(self.best).rate:",
        "test_planner.py::test_repetition_is_used",
    ),
    m(
        "speculation/weighing.py",
        "                if next(rates) > next(rates):\n                    return",
        "                pass",
        "test_planner.py::test_stretches_of_repetition_are_waited_for",
    ),
    m(
        "speculation/weighing.py",
        "a for a in actions if a[1] <= max(s.draft_limit, shortest[a[0]])",
        "a for a in actions",
        "test_planner.py::test_actions_stay_within_what_requests_allow",
    ),
    m(
        "speculation/planner.py",
        "reported != proposers:",
        "not reported:",
        "test_decisions.py::test_chances_of_another_proposer_are_stale",
    ),
    m(
        "speculation/planner.py",
        "        self._unread = False\n        proposers",
        "        proposers",
        "test_decisions.py::test_a_report_is_read_once",
    ),
    m(
        "speculation/planner.py",
        "            chances[unknown] = self.offers.latest(int(unknown.sum()), proposers, steps)",
        "            chances[unknown] = 0.0",
        "test_planner.py::test_who_just_arrived_is_expected_to_be_like_the_others",
    ),
    m(
        "speculation/offers.py",
        "rows = rows[rows[:, steps - 1] > 0.0]",
        "rows = rows[rows[:, 0] > 0.0]",
        "test_goodput.py",
    ),
    m(
        "speculation/offers.py",
        "rows[:, wanted:] = 0.0",
        "pass",
        "test_offers.py",
    ),
    m(
        "speculation/offers.py",
        "        for proposer in self.drafters if steps != wanted else ():",
        "        for proposer in ():",
        "test_offers.py",
    ),
    # --- acceptance, learnt -----------------------------------------------------------------------
    m(
        "speculation/estimator.py",
        "return torch.where(offered, path, 0.0).cummin(dim=1).values",
        "return torch.where(offered, path, 0.0)",
        "test_trees.py", "test_books.py",
    ),
    m(
        "kernels/cpu/learn.c",
        "chances[j] = j && chances[j - 1] < path[j] ? chances[j - 1] : path[j];",
        "chances[j] = path[j];",
        "test_books.py",
    ),
    m(
        "speculation/estimator.py",
        "self.watched_length[slots] = torch.where(last, torch.minimum(watched, lengths), watched)",
        "self.watched_length[slots] = watched",
        "test_structured.py",
    ),
    m(
        "speculation/estimator.py",
        "        decay = SLOT_DECAY**trials",
        "        decay = SLOT_DECAY",
        "test_controller.py", "test_books.py",
    ),
    m(
        "speculation/estimator.py",
        "agreement = (hits - trials * mean) * (self.hits[slots] - own_trials * mean)",
        "agreement = (hits - trials * mean) * self.hits[slots]",
        "test_prior_weight.py",
    ),
    m(
        "kernels/cpu/learn.c",
        "if (books->watched_length[place] || !length) return;",
        "if (!length) return;",
        "test_controller.py",
    ),
    # --- offers -----------------------------------------------------------------------------------
    m(
        "speculation/torch_books.py",
        "            controller.lengths[index].index_fill_(0, slots, 0)\n            return",
        "            return",
        "test_books.py",
    ),
    m(
        "kernels/cpu/learn.c",
        "            books->lengths[index * books->slots + slot] = 0;\n    }\n    float",
        "            ;\n    }\n    float",
        "test_books.py",
    ),
    m(
        "speculation/torch_books.py",
        "            offers.clear(slots)",
        "            pass",
        "test_books.py",
    ),
    m(
        "kernels/cpu/learn.c",
        "        if (!proposing)\n            withdraw(books, slot);\n        else if",
        "        if",
        "test_books.py",
    ),
    m(
        "speculation/torch_books.py",
        "room = (state.limit[slots] - state.length[slots] - 1).unsqueeze(1)",
        "room = (state.limit[slots] - state.length[slots]).unsqueeze(1)",
        "test_controller.py",
    ),
    m(
        "speculation/torch_books.py",
        "lengths = torch.minimum(lengths, self.controller.draft_limit[slots]).clamp(min=0)",
        "lengths = lengths.clamp(min=0)",
        "test_controller.py",
    ),
    m(
        "speculation/torch_books.py",
        "return ((rank < room) & (flat > 0)).view(chances.shape).sum(dim=1)",
        "return ((rank <= room) & (flat > 0)).view(chances.shape).sum(dim=1)",
        "test_round.py", "test_books.py",
    ),
    m(
        "speculation/round.py",
        "return self.books.within(drafts, limit - self.state.length[slots])",
        "return self.books.within(drafts, limit - self.state.length[slots] + 1)",
        "test_draft_limits.py",
    ),
    m(
        "speculation/drafting/proposer.py",
        "context_limit=network.max_positions + network.behind,",
        "context_limit=network.max_positions,",
        "test_draft_limits.py",
    ),
    m(
        "speculation/drafting/proposer.py",
        "context_limit=network.max_positions + network.behind,",
        "context_limit=network.max_positions + network.behind + 1,",
        "test_draft_limits.py",
    ),
    # --- acceptance -------------------------------------------------------------------------------
    m(
        "kernels/acceptance.py",
        "return equal.long().cumprod(dim=1).sum(dim=1)",
        "return equal.long().sum(dim=1)",
        "test_round.py", "test_sampling.py", "test_books.py",
    ),
    m(
        "kernels/acceptance.py",
        "kept = torch.minimum(torch.minimum(counts, before_end + 1), room).clamp(min=0)",
        "kept = torch.minimum(torch.minimum(counts, before_end), room).clamp(min=0)",
        "test_round.py", "test_books.py",
    ),
    m(
        "kernels/acceptance.py",
        "limited = (kept >= room) & (counts > 0)",
        "limited = (kept > room) & (counts > 0)",
        "test_round.py", "test_books.py",
    ),
    m(
        "kernels/rounds.py",
        "after = torch.where(kept > 0, old_length + kept - 1, first + spans.known)",
        "after = torch.where(kept > 0, old_length + kept, first + spans.known)",
        "test_round.py", "test_books.py",
    ),
    m(
        "speculation/trees.py",
        "right = right & (index[:width] < drafts.unsqueeze(1))",
        "right = right & (index[:width] <= drafts.unsqueeze(1))",
        "test_trees.py",
    ),
    m(
        "speculation/trees.py",
        "batch.key_index - offset + depth,",
        "batch.key_index,",
        "test_trees.py", "test_tree_rounds.py", "test_triton_tree_rounds.py",
    ),
    m(
        "speculation/trees.py",
        "moved = depth <= paths.lengths.unsqueeze(1)",
        "moved = depth < paths.lengths.unsqueeze(1)",
        "test_trees.py",
    ),
    # --- drafters with a network ------------------------------------------------------------------
    m(
        "kernels/drafting.py",
        "ends = (batch.key_index % block_size == block_size - 1) & (row_slot >= 0)",
        "ends = batch.key_index % block_size == block_size - 1",
        "test_triton_drafting.py", "test_eagle3_drafter.py", "test_drafter_state.py",
    ),
    m(
        "kernels/drafting.py",
        "shifted = torch.where(begins.unsqueeze(1), before[owner], shifted)",
        "shifted = torch.where(begins.unsqueeze(1), features, shifted)",
        "test_eagle3_engine.py",
    ),
    m(
        "speculation/round.py",
        "return torch.cat([features[:, at * hidden : (at + 1) * hidden] for at in places], dim=1)",
        "return features[:, places[0] * hidden : (places[0] + len(places)) * hidden]",
        "test_round.py",
    ),
    m(
        "speculation/round.py",
        "self.capture = sorted({layer for need in self.needs for layer in need.captured_layers})",
        "self.capture = [layer for need in self.needs for layer in need.captured_layers]",
        "test_round.py", "test_eagle3_use.py",
    ),
    m(
        "speculation/proposers/eagle3/proposer.py",
        "page = (state.computed[slot] - 1).clamp(min=0) // state.block_size",
        "page = state.computed[slot] // state.block_size",
        "test_eagle3_engine.py",
    ),
    m(
        "speculation/round.py",
        "served = self.controller.allowed[index] if need.has_network else None",
        "served = None",
        "test_drafter_state.py",
    ),
)
