"""What the HTTP front and the core process say to each other: msgpack over one socket.

Arrays instead of maps on the wire, as a message is sent every round. Ids are those of choices:
one per prompt and ``n``.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from surefoot.config import EngineConfig
from surefoot.request import SamplingParams, SpeculationParams, TokenLogprobs


class _Message(msgspec.Struct, array_like=True, tag=True):
    pass


class Start(_Message):
    """To the core, once: load this model."""

    config: EngineConfig


class Add(_Message):
    """A prompt and the ids of its choices; answered by ``Accepted`` or ``Refused``."""

    ids: list[str]
    prompt: list[int]
    params: SamplingParams
    speculation: SpeculationParams
    priority: int = 0
    """Lower ones are let in first."""
    pools: bool = False
    """Whether the prompt's embedding is wanted, rather than a text."""


class Abort(_Message):
    """End these; unknown ids have ended already. There is no answer."""

    ids: list[str]


class Stop(_Message):
    """Leave. What still runs is dropped."""


class Loading(_Message):
    """A step of the start: (label, done, total), a total of 0 for unknown."""

    label: str
    done: int
    total: int


class Logged(_Message):
    """What was logged during the start: a level of ``logging`` and a line."""

    level: int
    text: str


class Ready(_Message):
    """The engine stands. Lengths and sizes are in tokens."""

    description: str
    max_model_len: int
    kv_tokens: int
    max_num_seqs: int
    max_draft_tokens: int
    vocab_size: int
    end_tokens: tuple[int, ...]
    proposers: list[str]
    saving_known: bool
    """Whether rounds were measured, so that ``saved_seconds`` means something."""
    deterministic: bool = False
    """``Engine.deterministic``."""
    sampling_defaults: dict[str, int | float] = {}
    """Fields of ``SamplingParams`` for requests that do not set them."""
    memory: dict[str, int] = {}
    """Bytes of a GPU by part (``MemoryPlan``); empty without one."""
    build: dict[str, str] = {}
    """What runs: version, backend, device, dtype."""

    @property
    def room(self) -> int:
        """Most tokens of a prompt: the context, or the KV pool, holds one more."""
        return min(self.max_model_len, self.kv_tokens) - 1


class Failed(_Message):
    """The model could not be loaded, by the user's mistake (fields of SurefootError)."""

    option: str
    problem: str
    fix: str


class Accepted(_Message):
    ids: list[str]


class Refused(_Message):
    """Fields of SurefootError: why these choices cannot run."""

    ids: list[str]
    option: str
    problem: str
    fix: str


class SwitchedOff(_Message):
    """Proposers that failed, which propose nothing any more; the engine goes on."""

    proposers: list[str]
    error: str


class Crashed(_Message):
    """The engine failed; the core ends after this."""

    error: str


class News(msgspec.Struct, array_like=True):
    """One choice's share of a round. ``proposer``, of the drafts that were verified, ``offerer``,
    of those on offer for the next round, and ``host``, of those that the host had on offer for this
    one, are indices into ``Ready.proposers``, -1 for no drafts; the first ``accepted`` of
    ``tokens`` were drafts."""

    id: str
    tokens: list[int]
    proposer: int = -1
    offered: int = 0
    verified: int = 0
    accepted: int = 0
    finish: str | None = None
    stop: int | str | None = None
    cached: int = 0
    """With the first tokens: leading prompt positions found in the prefix cache."""
    queued: float = 0.0
    """With the first tokens: seconds from arrival until it was let in."""
    logprobs: list[bytes] | None = None
    """Of each token: what ``pack_score`` makes of it."""
    prompt_logprobs: list[bytes] | None = None
    """With the first tokens, of a scored prompt: what ``pack_scores`` makes of them."""
    offerer: int = -1
    hosted: int = 0
    host: int = -1
    embedding: list[float] | None = None
    """With the end, where it was asked for: the mean of the prompt's last, normed hidden
    states."""


class Totals(msgspec.Struct, array_like=True):
    """The engine's state and counters; see ``surefoot.engine.stats`` and
    ``surefoot.speculation.planner`` for those."""

    running: int = 0
    waiting: int = 0
    used_blocks: int = 0
    blocks: int = 0
    rounds: int = 0
    rows: int = 0
    draft_rows: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    without_drafters: int = 0
    probes: int = 0
    barren_rounds: int = 0
    believed_seconds: float = 0.0
    measured_seconds: float = 0.0
    saved_seconds: float = 0.0


class Round(_Message):
    """What one round committed, or, without news, that the engine came to rest."""

    news: list[News]
    totals: Totals


ToCore = Start | Add | Abort | Stop
ToFront = Loading | Logged | Ready | Failed | Accepted | Refused | Round | SwitchedOff | Crashed

encode = msgspec.msgpack.Encoder().encode
SCORES_AT_ONCE = 256
"""Positions whose logprobs are encoded, and decoded, at one go."""


def pack_score(score: TokenLogprobs) -> bytes:
    """Logprobs of one position, which are decoded when somebody wants them: until then they are
    small, and nothing that a garbage collection has to look through."""
    return encode(score)


class _OwnLogprob(msgspec.Struct):
    logprob: float


def own_logprob(score: bytes) -> float:
    """Of a position's packed logprobs, that of the token there."""
    return _decode_own(score).logprob


def pack_scores(scores: Sequence[TokenLogprobs]) -> list[bytes]:
    """Logprobs in pieces, which are decoded when somebody wants them."""
    starts = range(0, len(scores), SCORES_AT_ONCE)
    return [encode(scores[at : at + SCORES_AT_ONCE]) for at in starts]


_decode_own = msgspec.msgpack.Decoder(_OwnLogprob).decode
decode_score = msgspec.msgpack.Decoder(TokenLogprobs).decode
"""Those of one position."""
decode_scores = msgspec.msgpack.Decoder(list[TokenLogprobs]).decode
"""Those of one piece."""
decode_to_core = msgspec.msgpack.Decoder(ToCore).decode
decode_to_front = msgspec.msgpack.Decoder(ToFront).decode
