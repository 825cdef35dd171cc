"""A small client of OpenAI-compatible completion servers, for greedy text and its logprobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from surefoot.errors import SurefootError

if TYPE_CHECKING:
    import httpx

TOP = 5
TIMEOUT = 300.0


@dataclass(frozen=True)
class Completion:
    """``tokens``, ``logprobs`` and ``top`` are empty where the server gives no logprobs."""

    text: str
    finish: str
    tokens: tuple[str, ...] = ()
    logprobs: tuple[float, ...] = ()
    top: tuple[dict[str, float], ...] = ()

    @property
    def pieces(self) -> tuple[str, ...]:
        """What is compared: tokens, or else characters."""
        return self.tokens or tuple(self.text)


class Server:
    """One server. ``url`` with or without ``/v1``; ``model`` None takes the only one it lists."""

    def __init__(self, url: str, model: str | None = None) -> None:
        try:
            import httpx
        except ImportError:
            raise SurefootError("url", "needs httpx", "pip install httpx") from None
        self.url = url.rstrip("/").removesuffix("/v1") + "/v1"
        self._client: httpx.Client = httpx.Client(timeout=TIMEOUT)
        self._errors = (httpx.HTTPError, httpx.InvalidURL)
        self.model = self._only_model() if model is None else model
        self.gives_logprobs = True

    def close(self) -> None:
        self._client.close()

    def _only_model(self) -> str:
        listed = self._request("GET", "/models").get("data") or []
        names = [str(item.get("id")) for item in listed]
        if len(names) != 1:
            raise SurefootError(
                "url", f"{self.url} lists {len(names)} models ({', '.join(names)})", "serve one"
            )
        return names[0]

    def complete(self, prompt: str, max_tokens: int) -> Completion:
        """Greedy completion; asks for logprobs until the server refuses them."""
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "seed": 0,
        }
        if self.gives_logprobs:
            try:
                return self._read(self._request("POST", "/completions", {**body, "logprobs": TOP}))
            except _Refused:
                self.gives_logprobs = False
        try:
            return self._read(self._request("POST", "/completions", body))
        except _Refused as error:
            raise SurefootError("url", f"{self.url} refuses completions: {error}") from None

    def _request(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        try:
            response = self._client.request(method, self.url + path, json=body)
        except self._errors as error:
            raise SurefootError("url", f"{self.url} cannot be reached: {error}") from None
        if response.status_code == 404:
            raise SurefootError("url", f"{self.url}{path} is not there", "name an OpenAI API")
        if body is not None and response.status_code in (400, 422, 501):
            raise _Refused(response.text[:200])
        if response.status_code != 200:
            raise SurefootError(
                "url", f"{self.url}{path} answered {response.status_code}: {response.text[:200]}"
            )
        try:
            answer = response.json()
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise SurefootError("url", f"{self.url}{path} answers no JSON object")
        return answer

    def _read(self, answer: dict[str, Any]) -> Completion:
        try:
            choice = answer["choices"][0]
            text, finish = str(choice["text"]), str(choice.get("finish_reason"))
            scores = choice.get("logprobs")
            if not scores:
                self.gives_logprobs = False
                return Completion(text, finish)
            # The top list may be left out; then no difference can be explained.
            top: Sequence[Any] = scores.get("top_logprobs") or []
            return Completion(
                text,
                finish,
                tuple(str(token) for token in scores["tokens"]),
                tuple(float(value) for value in scores["token_logprobs"]),
                tuple(dict(entry or {}) for entry in top),
            )
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise SurefootError("url", f"{self.url}/completions lacks a field: {error!r}") from None


class _Refused(Exception):
    """The server does not take this body."""
