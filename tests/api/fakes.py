"""A tokenizer of bytes and a gateway that answers by rule: what the API is tested against."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import msgspec
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from cluster.gateway import GenerateRequest, ServedModel
from sonar.errors import CapacityError
from sonar.messages import FinishReason, Logprob, TokenEvent
from sonar.tokenizer import Tokenizer
from sonar.tokenizer.chat_template import ChatTemplates
from sonar.tokenizer.tokenizer import SpecialTokens

BOS, EOS, VOCAB_SIZE = 256, 257, 258
TEXT = "The quick brown fox jumps over the lazy dog. Ça coûte 5 €. "
CHAT_TEMPLATE = """\
{% for m in messages %}[{{ m.role }}]{{ m.content }}
{% endfor %}{% if effort %}({{ effort }}){% endif %}{% if add_generation_prompt %}[assistant]{% endif %}"""


def byte_tokenizer(chat_template: str = CHAT_TEMPLATE) -> Tokenizer:
    """One token a byte, its id the byte; 256 is bos, put before texts, 257 eos."""
    letters = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in letters]
    vocab = {chr(byte): byte for byte in letters} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
    core = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken("<s>", normalized=False), AddedToken("</s>", normalized=False)])
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    return Tokenizer(
        core, SpecialTokens(names, prefix_ids=(BOS,)), ChatTemplates({"default": chat_template}, "fake"), ""
    )


@dataclass
class FakeGateway:
    """Answers each request with the bytes of `text`, turned by the request's seed, in events of `per_event` tokens.

    Attributes:
        delay_s: before each event. eos_after: tokens until eos is drawn, None for never.
        fail: called with (request, number of the next token); may raise, or return the text of an ERROR event.
        open_ids, ended: ids running, and id -> how it ended ("stop", ..., or "closed" when the iterator was).
    """

    text: bytes = TEXT.encode()
    delay_s: float = 0.0
    per_event: int = 1
    eos_after: int | None = None
    num_cached: int = 0
    ready: bool = True
    is_recovering: bool = False
    note: str = ""
    error_code: str = ""
    probe_result: bool | Exception = True
    max_model_len: int = 2048
    queue_size: int = 10_000
    names: tuple[str, ...] = ("fake", "alias/of-fake")
    fail: Callable[[GenerateRequest, int], str | None] = lambda request, number: None
    drawn_logprob: Callable[[GenerateRequest], float] = lambda request: -1.0
    requests: list[GenerateRequest] = field(default_factory=list)
    open_ids: dict[str, asyncio.Future[FinishReason]] = field(default_factory=dict)
    ended: dict[str, str] = field(default_factory=dict)
    aborts: list[tuple[str, FinishReason]] = field(default_factory=list)
    num_probes: int = 0

    def models(self) -> list[ServedModel]:
        return [
            ServedModel(
                name,
                "/somewhere/fake",
                self.max_model_len,
                1_700_000_000,
                self.ready,
                (EOS,),
                self.is_recovering,
                self.note,
            )
            for name in self.names
        ]

    def token(self, request: GenerateRequest, number: int) -> int:
        assert request.sampling.seed is not None
        if self.eos_after is not None and number >= self.eos_after and not request.sampling.ignore_eos:
            return EOS
        return self.text[(number + request.sampling.seed % 1000) % len(self.text)]

    def logprobs(self, token_id: int, count: int | None, drawn: float = -1.0) -> list[Logprob]:
        if count is None:
            return []
        others = [Logprob((token_id + k) % 256, drawn - k, k + 1) for k in range(count)]
        return [Logprob(token_id, drawn, 1), *others]

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenEvent]:
        if len(self.open_ids) >= self.queue_size:
            raise CapacityError(f"the queue is full: {self.queue_size} requests wait")
        self.requests.append(request)
        told: asyncio.Future[FinishReason] = asyncio.get_running_loop().create_future()
        self.open_ids[request.request_id] = told
        how = "closed"
        try:
            async for event in self._events(request, told):
                how = event.finish.value if event.finish else how
                yield event
        finally:
            del self.open_ids[request.request_id]
            self.ended[request.request_id] = how

    async def _events(self, request: GenerateRequest, told: asyncio.Future[FinishReason]) -> AsyncIterator[TokenEvent]:
        number = first = len(request.emitted_token_ids or ())
        while True:
            await asyncio.wait((told,), timeout=self.delay_s) if self.delay_s else await asyncio.sleep(0)
            error = self.fail(request, number)
            if error is not None or told.done():
                finish = FinishReason.ERROR if error is not None else told.result()
                yield TokenEvent(
                    request_id=request.request_id,
                    first=number,
                    token_ids=[],
                    finish=finish,
                    error=error or "",
                    error_code=self.error_code,
                )
                return
            event = self._event(request, number)
            if first:  # prompt figures were given before
                event = msgspec.structs.replace(event, prompt_logprobs=[], num_cached_tokens=-1)
            yield event
            number += len(event.token_ids)
            if event.finish is not None:
                return

    def _event(self, request: GenerateRequest, number: int) -> TokenEvent:
        params, ids = request.sampling, list[int]()
        assert params.max_tokens is not None
        stop_ids = (*(() if params.ignore_eos else (EOS,)), *params.stop_token_ids)
        while len(ids) < self.per_event and number + len(ids) < params.max_tokens and not set(ids) & set(stop_ids):
            ids.append(self.token(request, number + len(ids)))
        stop_id = ids[-1] if ids[-1] in stop_ids else None
        finish = FinishReason.LENGTH if number + len(ids) == params.max_tokens else None
        rows = [self.logprobs(i, params.logprobs, self.drawn_logprob(request)) for i in ids]
        prompt_rows = [self.logprobs(i, params.prompt_logprobs) for i in request.prompt_token_ids[1:]]
        return TokenEvent(
            request_id=request.request_id,
            first=number,
            token_ids=ids,
            finish=FinishReason.STOP if stop_id is not None else finish,
            logprobs=rows if params.logprobs is not None else [],
            prompt_logprobs=prompt_rows if number == 0 and params.prompt_logprobs is not None else [],
            num_cached_tokens=self.num_cached if number == 0 else -1,
            stop_token_id=stop_id,
        )

    def abort(self, request_id: str, finish: FinishReason = FinishReason.ABORT) -> None:
        self.aborts.append((request_id, finish))
        told = self.open_ids.get(request_id)
        if told is not None and not told.done():
            told.set_result(finish)

    async def probe(self, model: str, timeout_s: float) -> bool:
        self.num_probes += 1
        await asyncio.sleep(self.delay_s)
        if isinstance(self.probe_result, Exception):
            raise self.probe_result
        return self.probe_result
