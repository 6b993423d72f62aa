"""Offline use: a model in this process, prompts in, texts out.

    with LLM("smollm2-135m") as llm:
        print(llm.generate("The capital of France is", SamplingParams(max_tokens=16))[0].text)

The same engine that a replica runs, driven from the calling thread. Knows nothing of HTTP or of other processes. For
users' programs, and `sonar bench offline`. One thread at a time; several calls may be open at once (a stream that is
read while another call runs), they share the engine's batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from sonar.config import CacheConfig, EngineConfig, SchedulerConfig
from sonar.engine import BuiltEngine, build_engine
from sonar.errors import ConfigError, SonarError, UserError
from sonar.messages import FinishReason, Submit, TokenEvent
from sonar.outputs import RequestOutput, SequenceCollector, StreamUpdate, Usage
from sonar.packaged_model import Progress, no_progress
from sonar.sampling_params import SamplingParams, child_seed
from sonar.scheduler.admission import make_spec
from sonar.tokenizer import OutputText, Tokenizer, load_tokenizer
from sonar.worker.resolve import SettingRow

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class _PromptText:
    """A prompt ready to compute. is_chat: its text ends where an answer begins, rather than within a text."""

    text: str | None
    token_ids: list[int]
    is_chat: bool = False


class LLM:
    """A model loaded in this process.

    Args:
        model: folder, `.gguf` file, hub id or alias.
        progress: told (phase, done, total) while the model loads.
        cache_dir: for downloaded and derived files; None = the user's cache folder.
        settings: fields of `EngineConfig`; fields of `CacheConfig` and `SchedulerConfig` may be given flat
            (`block_size=32`, `max_model_len=4096`).

    Attributes:
        tokenizer: the model's.

    Raises:
        ConfigError, ModelError, CapacityError: with the remedy.
    """

    def __init__(
        self, model: str, *, progress: Progress = no_progress, cache_dir: Path | None = None, **settings: Any
    ) -> None:
        config = make_engine_config(model, settings)
        self._built: BuiltEngine = build_engine(config, progress, cache_dir=cache_dir)
        self.tokenizer: Tokenizer = load_tokenizer(self._built.source)
        self._open: dict[str, tuple[SequenceCollector, deque[StreamUpdate]]] = {}
        self._waiting: deque[Submit] = deque()
        self._num_prompts = 0
        self._num_calls = 0
        self._is_closed = False

    @property
    def config(self) -> EngineConfig:
        """The configuration without `auto`."""
        return self._built.config

    @property
    def settings(self) -> tuple[SettingRow, ...]:
        """What each `auto` became, and why: rows of (name, value, reason)."""
        return self._built.settings

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[RequestOutput]:
        """Continues each prompt.

        Args:
            prompts: a text or token ids, or several of either.
            sampling: for all prompts, or one for each; None = defaults. Without a seed, prompt i of this object's life
                draws with a seed that follows from `EngineConfig.seed` and i.
            progress: told (finished sequences, all) as sequences finish.

        Returns:
            one output a prompt, in order.
        Raises:
            UserError: a prompt or setting cannot be served, by number and reason; nothing is computed then.
        """
        return self._run(self._read_prompts(prompts), sampling, progress)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation or several, each written as a prompt by the model's chat template.

        Args:
            messages: a list of {"role", "content"}, or a list of such lists.
            tools, template_kwargs: handed to the template.

        Returns, raises: as `generate`; also UserError when the template refuses the messages or there is none.
        """
        return self._run(self._read_chats(messages, tools, template_kwargs), sampling, progress)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[StreamUpdate]:
        """Continues each prompt, and yields what each step adds to each sequence. Closing the iterator early aborts.

        Raises: as `generate`, at the first `next`.
        """
        return self._stream(self._read_prompts(prompts), sampling)

    def stream_chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[StreamUpdate]:
        """`chat`, as `stream` yields it."""
        return self._stream(self._read_chats(messages, tools, template_kwargs), sampling)

    def close(self) -> None:
        """Frees the model; further calls raise. May be called twice."""
        if not self._is_closed:
            self._is_closed = True
            self._open.clear()
            self._waiting.clear()
            self._built.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # --- prompts ---

    def _read_prompts(self, prompts: Prompt | Sequence[Prompt]) -> list[_PromptText]:
        is_one = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
        several: Sequence[Any] = [prompts] if is_one else prompts
        return [self._read_prompt(number, prompt) for number, prompt in enumerate(several)]

    def _read_prompt(self, number: int, prompt: object) -> _PromptText:
        if isinstance(prompt, str):
            return _PromptText(prompt, self.tokenizer.encode(prompt))
        if isinstance(prompt, Sequence) and all(isinstance(token, int) for token in prompt):
            return _PromptText(None, list(prompt))
        raise UserError(f"prompt {number} is a {type(prompt).__name__}; give a text or token ids", param="prompts")

    def _read_chats(
        self,
        messages: Messages | Sequence[Messages],
        tools: Sequence[Mapping[str, Any]] | None,
        template_kwargs: Mapping[str, Any] | None,
    ) -> list[_PromptText]:
        is_one = len(messages) > 0 and isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if is_one else messages
        prompts = []
        for conversation in conversations:
            text = self.tokenizer.apply_chat_template(conversation, tools, template_kwargs=template_kwargs)
            prompts.append(_PromptText(text, self.tokenizer.encode(text, add_special_tokens=False), is_chat=True))
        return prompts

    def _submits(
        self, prompts: list[_PromptText], sampling: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[tuple[Submit, SequenceCollector]]:
        """One a sequence, checked."""
        settings = _one_each(sampling, len(prompts))
        self._num_calls += 1
        made = []
        for number, (prompt, params) in enumerate(zip(prompts, settings)):
            self._num_prompts += 1
            seed = child_seed(self.config.seed, self._num_prompts) if params.seed is None else params.seed
            for index in range(params.n):
                own = msgspec.structs.replace(params, n=1, seed=child_seed(seed, index))
                submit = Submit(
                    incarnation=0,
                    request_id=f"{self._num_calls}-{number}-{index}",
                    prompt_token_ids=prompt.token_ids,
                    sampling=own,
                )
                self._check(number, submit)
                text = OutputText(self.tokenizer, own, after_text=not prompt.is_chat)
                made.append((submit, SequenceCollector(number, index, own, text)))
        return made

    def _check(self, number: int, submit: Submit) -> None:
        try:
            make_spec(submit, self._built.limits, 0, 0.0)
        except UserError as error:
            raise UserError(f"prompt {number}: {error.message}", param=error.param, code=error.code) from error

    # --- running ---

    def _run(
        self,
        prompts: list[_PromptText],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        progress: Callable[[int, int], None] | None,
    ) -> list[RequestOutput]:
        made = self._submits(prompts, sampling)
        num_finished = 0
        for update in self._updates(made):
            if update.finish_reason is not None:
                num_finished += 1
                if progress is not None:
                    progress(num_finished, len(made))
        return _collect(prompts, [collector for _, collector in made])

    def _stream(
        self, prompts: list[_PromptText], sampling: SamplingParams | Sequence[SamplingParams] | None
    ) -> Iterator[StreamUpdate]:
        yield from self._updates(self._submits(prompts, sampling))

    def _updates(self, made: list[tuple[Submit, SequenceCollector]]) -> Iterator[StreamUpdate]:
        """Runs the engine until these sequences are finished; other calls' updates wait for them in `_open`."""
        self._refuse_if_closed()
        arrived: deque[StreamUpdate] = deque()
        for submit, collector in made:
            self._open[submit.request_id] = (collector, arrived)
            self._waiting.append(submit)
        try:
            num_left = len(made)
            while num_left:
                self._refuse_if_closed()
                self._step()
                while arrived:
                    update = arrived.popleft()
                    num_left -= update.finish_reason is not None
                    if update.error:
                        raise SonarError(f"prompt {update.prompt_index}: {update.error}")
                    yield update
        finally:
            self._forget([submit.request_id for submit, _ in made])

    def _step(self) -> None:
        """Hands waiting requests to the engine as far as its queue takes them, and runs one step."""
        engine = self._built.engine
        while self._waiting and engine.num_open < self.config.scheduler.max_waiting:
            submit = self._waiting.popleft()
            event = engine.add(submit)
            assert event is None, f"{submit.request_id} ended before it began"
        try:
            events = engine.step()
        except BaseException:
            self.close()
            raise
        for event in events:
            self._dispatch(event)

    def _dispatch(self, event: TokenEvent) -> None:
        collector, arrived = self._open[event.request_id]
        update = collector.take(event)
        arrived.append(update)
        if update.finish_reason is not None:
            del self._open[event.request_id]
            if event.finish is None:  # a stop string, of which the engine knows nothing
                self._built.engine.abort(event.request_id, FinishReason.STOP)

    def _forget(self, request_ids: list[str]) -> None:
        """Ends what a call has left open."""
        left = {request_id for request_id in request_ids if self._open.pop(request_id, None) is not None}
        if not left or self._is_closed:
            return
        self._waiting = deque(submit for submit in self._waiting if submit.request_id not in left)
        for request_id in left:
            self._built.engine.abort(request_id)

    def _refuse_if_closed(self) -> None:
        if self._is_closed:
            raise SonarError("this LLM is closed, or a step of it has failed; make a new one")


def make_engine_config(model: str, settings: Mapping[str, Any]) -> EngineConfig:
    """An `EngineConfig` from its own fields and flat ones of its cache and scheduler sections.

    Raises:
        ConfigError: an unknown field (lists the known ones), or one given both flat and within its section.
    """
    sections: dict[str, type[CacheConfig] | type[SchedulerConfig]] = {
        "cache": CacheConfig,
        "scheduler": SchedulerConfig,
    }
    own = {field.name for field in fields(EngineConfig)} - {"model"}
    flat = {
        field.name: section for section, kind in sections.items() for field in fields(kind) if field.name not in own
    }
    values: dict[str, Any] = {}
    inner: dict[str, dict[str, Any]] = {section: {} for section in sections}
    for name, value in settings.items():
        if name in own:
            values[name] = value
        elif name in flat:
            inner[flat[name]][name] = value
        else:
            raise ConfigError(f"{name!r} is no setting; known are {', '.join(sorted(own | set(flat)))}", param=name)
    for section, given in inner.items():
        if given and section in values:
            raise ConfigError(
                f"{next(iter(given))!r} is given flat beside {section}=...; use one of them", param=section
            )
        if given:
            values[section] = sections[section](**given)
    return EngineConfig(model=model, **values)


def _one_each(sampling: SamplingParams | Sequence[SamplingParams] | None, count: int) -> Sequence[SamplingParams]:
    if sampling is None or isinstance(sampling, SamplingParams):
        return [sampling or SamplingParams()] * count
    if len(sampling) != count:
        raise UserError(
            f"{len(sampling)} sampling settings for {count} prompts; give one, or one each", param="sampling"
        )
    return sampling


def _collect(prompts: list[_PromptText], collectors: list[SequenceCollector]) -> list[RequestOutput]:
    by_prompt: dict[int, list[SequenceCollector]] = {}
    for collector in collectors:
        by_prompt.setdefault(collector.prompt_index, []).append(collector)
    results = []
    for number, prompt in enumerate(prompts):
        of_prompt = by_prompt[number]
        outputs = [collector.output() for collector in of_prompt]
        usage = Usage(
            prompt_tokens=len(prompt.token_ids),
            completion_tokens=sum(len(output.token_ids) for output in outputs),
            cached_tokens=of_prompt[0].num_cached_tokens,
        )
        results.append(RequestOutput(prompt.text, prompt.token_ids, of_prompt[0].prompt_logprobs, outputs, usage))
    return results
