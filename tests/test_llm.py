"""Offline generation on a tiny model: what comes out, in which form, and what is said when it cannot be."""

from __future__ import annotations

import pytest

from sonar import LLM, SamplingParams
from sonar.config import CacheConfig, EngineConfig
from sonar.errors import ConfigError, ModelError, SonarError, UserError
from sonar.llm import make_engine_config
from sonar.messages import FinishReason
from sonar.sampling_params import child_seed
from tests.tiny import EOS_ID, write_tiny_folder

SMALL = {"device": "cpu", "threads": 1, "memory_bytes": 32 << 20}
GREEDY = SamplingParams(seed=0, temperature=0.0, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_tiny_folder("llama", tmp_path_factory.mktemp("llm")))


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(folder, **SMALL) as llm:
        yield llm


@pytest.fixture(autouse=True)
def nothing_is_left_open(llm):
    yield
    llm._built.engine.check()
    assert llm._built.engine.num_open == 0
    assert not llm._open and not llm._waiting


# --- what comes out ---


def test_prompts_of_every_form_in_their_order(llm):
    texts = ["one", "a second prompt", "three"]
    ids = [llm.tokenizer.encode(text) for text in texts]
    outputs = llm.generate(texts, GREEDY)
    assert [output.prompt for output in outputs] == texts
    assert [output.prompt_token_ids for output in outputs] == ids
    assert [output.outputs for output in llm.generate(ids, GREEDY)] == [output.outputs for output in outputs]
    assert llm.generate(texts[1], GREEDY)[0].outputs == outputs[1].outputs
    assert llm.generate(ids[1], GREEDY)[0].outputs == outputs[1].outputs
    assert llm.generate([], GREEDY) == []
    for output in outputs:
        (only,) = output.outputs
        assert (only.index, only.finish_reason, only.stop_reason) == (0, FinishReason.LENGTH, None)
        assert output.text == only.text == llm.tokenizer.decode(only.token_ids, after_text=True)
        assert (output.usage.prompt_tokens, output.usage.completion_tokens) == (len(output.prompt_token_ids), 20)


def test_settings_one_for_all_or_one_each(llm):
    each = [
        SamplingParams(temperature=0.0, max_tokens=3),
        SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True),
    ]
    outputs = llm.generate(["ab", "ab"], each)
    assert [output.usage.completion_tokens for output in outputs] == [3, 5]
    assert outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids[:3]


def test_n_sequences_draw_with_the_children_of_the_seed(llm):
    params = SamplingParams(seed=5, n=3, max_tokens=12, ignore_eos=True)
    (output,) = llm.generate("hello", params)
    assert [one.index for one in output.outputs] == [0, 1, 2]
    assert [one.seed for one in output.outputs] == [child_seed(5, i) for i in range(3)]
    assert output.outputs[0].seed == 5
    assert output.usage.completion_tokens == 36
    for one in output.outputs:
        alone = SamplingParams(seed=one.seed, max_tokens=12, ignore_eos=True)
        assert llm.generate("hello", alone)[0].outputs[0].token_ids == one.token_ids
    assert len({tuple(one.token_ids) for one in output.outputs}) == 3


def test_without_a_seed_runs_repeat_and_prompts_differ(folder):
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    runs = []
    for _ in range(2):
        with LLM(folder, **SMALL) as llm:
            runs.append([llm.generate("hello", params)[0].outputs[0].token_ids for _ in range(2)])
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[0][1]


def test_a_stop_string_ends_and_is_cut_off(llm):
    whole = llm.generate("stop me", GREEDY)[0]
    # Broken characters of a random model show only once they are over, so an ASCII one is looked for.
    start, stop = next((i, letter) for i, letter in enumerate(whole.text) if i > 1 and letter.isascii())
    assert stop not in whole.text[:start]
    (output,) = llm.generate("stop me", SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, stop=(stop,)))
    (one,) = output.outputs
    assert (one.text, one.finish_reason, one.stop_reason) == (whole.text[:start], FinishReason.STOP, stop)
    assert one.token_ids == whole.outputs[0].token_ids[: len(one.token_ids)]
    assert len(one.token_ids) < 20
    assert output.usage.completion_tokens == len(one.token_ids)
    params = SamplingParams(
        temperature=0.0, max_tokens=20, ignore_eos=True, stop=(stop,), include_stop_in_output=True, logprobs=0
    )
    (one,) = llm.generate("stop me", params)[0].outputs
    assert one.text == whole.text[: start + 1]
    assert len(one.logprobs) == len(one.token_ids)


def test_a_stop_token_ends_and_its_text_is_left_out(llm):
    whole = llm.generate("stop me", GREEDY)[0].outputs[0]
    stop = whole.token_ids[6]
    at = whole.token_ids.index(stop)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, stop_token_ids=(stop,))
    (one,) = llm.generate("stop me", params)[0].outputs
    assert one.token_ids == whole.token_ids[: at + 1]
    assert one.text == llm.tokenizer.decode(whole.token_ids[:at], after_text=True)
    assert (one.finish_reason, one.stop_reason) == (FinishReason.STOP, stop)


def test_end_of_sequence_stops_unless_ignored_or_too_early(llm):
    def forced(**more):
        params = SamplingParams(temperature=0.0, max_tokens=6, logit_bias={EOS_ID: 100.0}, **more)
        return llm.generate("x", params)[0].outputs[0]

    assert (forced().token_ids, forced().stop_reason) == ([EOS_ID], EOS_ID)
    assert forced(ignore_eos=True).token_ids == [EOS_ID] * 6
    late = forced(min_tokens=3).token_ids
    assert EOS_ID not in late[:3] and late[3:] == [EOS_ID]


def test_logprobs_and_prompt_logprobs(llm):
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    (output,) = llm.generate("log this", params)
    (one,) = output.outputs
    assert [[entry.rank for entry in row] for row in one.logprobs] == [[1, 1, 2]] * 4
    assert [row[0].token_id for row in one.logprobs] == one.token_ids
    assert [row[0].token_id for row in output.prompt_logprobs] == output.prompt_token_ids[1:]
    assert all(len(row) == 2 and row[1].rank == 1 for row in output.prompt_logprobs)
    again = llm.generate("log this", GREEDY)[0]
    assert (again.prompt_logprobs, again.outputs[0].logprobs) == ([], [])


def test_a_repeated_prompt_comes_from_the_cache(llm):
    prompt = "a prompt of more than two blocks, which are sixteen tokens each"
    first, second = (llm.generate(prompt, GREEDY)[0] for _ in range(2))
    assert second.usage.cached_tokens == (len(first.prompt_token_ids) - 1) // 16 * 16 > 0
    assert second.outputs == first.outputs


def test_chat_writes_prompts_by_the_models_template(llm):
    talk = [{"role": "user", "content": "hi"}]
    (output,) = llm.chat(talk, GREEDY)
    assert output.prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert output.prompt_token_ids == llm.tokenizer.encode(output.prompt, add_special_tokens=False)
    outputs = llm.chat([[{"role": "user", "content": "no"}], talk], GREEDY)
    assert outputs[1].outputs == output.outputs
    assert "".join(update.text for update in llm.stream_chat(talk, GREEDY)) == output.text


def test_more_prompts_than_the_queue_holds(folder):
    with LLM(folder, max_waiting=2, max_num_requests=2, **SMALL) as llm:
        seen = []
        outputs = llm.generate(["a", "b", "c", "d", "e", "f", "g"], GREEDY, progress=lambda *p: seen.append(p))
        assert [output.usage.completion_tokens for output in outputs] == [20] * 7
        assert seen == [(i, 7) for i in range(1, 8)]


# --- streams ---


def test_a_stream_adds_up_to_the_output(llm):
    prompts = ["one", "a second prompt"]
    params = SamplingParams(seed=3, n=2, max_tokens=15, ignore_eos=True, logprobs=1)
    texts, tokens, logprobs, finishes = {}, {}, {}, {}
    for update in llm.stream(prompts, params):
        key = (update.prompt_index, update.index)
        assert key not in finishes
        texts[key] = texts.get(key, "") + update.text
        tokens[key] = tokens.get(key, []) + update.token_ids
        logprobs[key] = logprobs.get(key, []) + update.logprobs
        if update.finish_reason is not None:
            finishes[key] = update.finish_reason
    for number, output in enumerate(llm.generate(prompts, params)):
        for one in output.outputs:
            key = (number, one.index)
            assert (texts[key], tokens[key], finishes[key]) == (one.text, one.token_ids, one.finish_reason)
            assert [row[0].token_id for row in logprobs[key]] == one.token_ids


def test_a_stream_left_early_is_aborted(llm):
    stream = llm.stream(["one", "two"], GREEDY)
    next(stream)
    assert llm._built.engine.num_open == 2
    stream.close()
    assert llm._built.engine.num_open == 0


def test_streams_and_calls_may_run_through_each_other(llm):
    expected = llm.generate(["left", "right"], GREEDY)
    left = llm.stream("left", GREEDY)
    tokens = list(next(left).token_ids)
    assert llm.generate("right", GREEDY)[0].outputs == expected[1].outputs
    tokens += [token for update in left for token in update.token_ids]
    assert tokens == expected[0].outputs[0].token_ids


# --- errors ---


@pytest.mark.parametrize(
    ("prompts", "sampling", "message"),
    [
        (["ok", "x" * 600], GREEDY, r"prompt 1: the prompt has 600 tokens and the context holds 512"),
        ([[5], [5, 512]], GREEDY, r"prompt 1: prompt has token id 512; the vocabulary's ids are 0 to 511"),
        ([""], GREEDY, r"prompt 0: the prompt has no tokens"),
        (["a", 5.0], GREEDY, r"prompt 1 is a float; give a text or token ids"),
        (["a", "b"], [GREEDY], r"1 sampling settings for 2 prompts"),
        ("a", SamplingParams(bad_words=((600,),)), r"prompt 0: bad_words has token id 600"),
        ("a", SamplingParams(logit_bias={-1: 1.0}), r"prompt 0: logit_bias has token id -1"),
    ],
)
def test_a_bad_request_is_named_and_nothing_is_computed(llm, prompts, sampling, message):
    steps = llm._built.engine.stats().steps
    with pytest.raises(UserError, match=message):
        llm.generate(prompts, sampling)
    assert llm._built.engine.stats().steps == steps


def test_a_conversation_the_template_refuses_is_the_users_error(llm):
    with pytest.raises(UserError, match="does not accept these messages"):
        llm.chat([{"role": "user", "content": {"not": "text"}}], GREEDY)


def test_settings_may_be_flat_or_in_sections(folder):
    flat = make_engine_config("m", {"device": "cpu", "block_size": 32, "max_model_len": 100, "seed": 3})
    assert (flat.device, flat.cache.block_size, flat.scheduler.max_model_len, flat.seed) == ("cpu", 32, 100, 3)
    assert make_engine_config("m", {"cache": CacheConfig(block_size=8)}).cache.block_size == 8
    assert make_engine_config("m", {}) == EngineConfig(model="m")
    assert make_engine_config("m", {"dtype": "bfloat16"}).cache.dtype == "auto"
    with pytest.raises(ConfigError, match=r"'blocksize' is no setting; known are .*block_size"):
        LLM(folder, blocksize=32)
    with pytest.raises(ConfigError, match="given flat beside cache"):
        LLM(folder, cache=CacheConfig(), block_size=8)


def test_a_model_that_is_not_there(tmp_path):
    with pytest.raises(ModelError, match="is no file, folder, alias or hub id"):
        LLM(str(tmp_path / "none"))


def test_a_closed_llm_says_so(folder):
    llm = LLM(folder, **SMALL)
    stream = llm.stream("a", GREEDY)
    next(stream)
    llm.close()
    llm.close()
    with pytest.raises(SonarError, match="is closed"):
        next(stream)
    with pytest.raises(SonarError, match="is closed"):
        llm.generate("a", GREEDY)


def test_a_failed_step_closes_it(folder, monkeypatch):
    with LLM(folder, **SMALL) as llm:
        monkeypatch.setattr(llm._built.engine._executor._parts.model, "forward", lambda batch: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            llm.generate("a", GREEDY)
        with pytest.raises(SonarError, match="a step of it has failed"):
            llm.generate("a", GREEDY)


def test_loading_tells_its_progress_and_the_settings(folder):
    phases = []
    with LLM(folder, progress=lambda phase, done, total: phases.append(phase), **SMALL) as llm:
        assert phases[:4] == ["find model", "load weights", "measure memory", "allocate KV cache"]
        settings = {row.name: row.value for row in llm.settings}
        assert settings["max_model_len"] == "512" == str(llm.config.scheduler.max_model_len)
        assert settings["ops"]
