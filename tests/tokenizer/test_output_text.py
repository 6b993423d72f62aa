"""One request's text from its tokens: stop strings across tokens, stop tokens, min_tokens."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from sonar.sampling_params import SamplingParams
from sonar.tokenizer import OutputText, TextDelta, Tokenizer, find_bad_words

TEXT = "The answer is 42. END of the answer 🙂."


def test_text_without_stops(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    output = OutputText(tokenizer, SamplingParams())
    deltas = [output.push([token], is_last=i == len(ids) - 1) for i, token in enumerate(ids)]
    assert "".join(delta.text for delta in deltas) == TEXT
    assert all(delta.num_tokens == 1 and delta.stop is None for delta in deltas)


def test_stop_string_across_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    for include, expected in ((False, "The answer is 42. "), (True, "The answer is 42. END of")):
        output = OutputText(tokenizer, SamplingParams(stop=("no", "END of"), include_stop_in_output=include))
        delta = output.push(ids, is_last=True)
        assert (delta.text, delta.stop, output.stop) == (expected, "END of", "END of")
        assert tokenizer.decode(ids[: delta.num_tokens]).endswith("END of")
        assert not tokenizer.decode(ids[: delta.num_tokens - 1]).endswith("END of")


@settings(max_examples=100, deadline=None)
@given(cuts=st.lists(st.integers(1, 6), max_size=12), stop=st.sampled_from(["END", "42", ".", "answer", "🙂", "xyz"]))
def test_result_does_not_depend_on_how_tokens_come(tokenizer: Tokenizer, cuts: list[int], stop: str) -> None:
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    sampling = SamplingParams(stop=(stop,))
    whole = OutputText(tokenizer, sampling).push(ids, is_last=True)
    output, text, consumed, rest = OutputText(tokenizer, sampling), "", 0, ids
    for size in [*cuts, len(ids)]:
        delta = output.push(rest[:size], is_last=size >= len(rest))
        text, consumed, rest = text + delta.text, consumed + delta.num_tokens, rest[size:]
        if delta.stop is not None or not rest:
            break
    assert (text, consumed, output.stop) == (whole.text, whole.num_tokens, whole.stop)
    assert text == TEXT.partition(stop)[0]


def test_stop_token_is_left_out_unless_asked_for(demo: Tokenizer) -> None:
    ids = [*demo.encode("Hi"), 2]
    shown = OutputText(demo, SamplingParams(), skip_special_tokens=False)
    assert shown.push(ids, is_last=True, stop_token_id=2) == TextDelta("Hi", len(ids))
    included = OutputText(demo, SamplingParams(include_stop_in_output=True), skip_special_tokens=False)
    assert included.push(ids, is_last=True, stop_token_id=2).text == "Hi<|im_end|>"
    word = demo.encode(" there")
    assert OutputText(demo, SamplingParams()).push([*word, *word], is_last=True, stop_token_id=word[0]).text == " there"


def test_last_event_without_tokens_gives_what_was_held_back(demo: Tokenizer) -> None:
    output = OutputText(demo, SamplingParams(stop=("end.",)))
    assert output.push(demo.encode("the en")).text == "the "
    assert output.push([], is_last=True) == TextDelta("en", 0)
    half = OutputText(demo, SamplingParams())
    assert half.push(demo.encode("🦜")[:1]).text == ""
    assert half.push([], is_last=True).text == "\ufffd"


def test_stops_wait_for_min_tokens(demo: Tokenizer) -> None:
    ids = demo.encode("a b a b")
    assert len(ids) == 4
    output = OutputText(demo, SamplingParams(stop=("b",), min_tokens=2))
    assert output.push(ids, is_last=True) == TextDelta("a b a ", 4, "b")


def test_completion_keeps_the_space_of_its_first_word(pieces: Tokenizer) -> None:
    ids = pieces.encode("Hello", add_special_tokens=False)
    assert OutputText(pieces, SamplingParams(), after_text=True).push(ids, is_last=True).text == " Hello"
    assert OutputText(pieces, SamplingParams()).push(ids, is_last=True).text == "Hello"


def test_bad_words_with_and_without_space(demo: Tokenizer, pieces: Tokenizer) -> None:
    for tokenizer in (demo, pieces):
        found = find_bad_words(tokenizer, ["string", " string", "New York"])
        spelled = ["".join(tokenizer.token_to_bytes(i).decode() for i in ids) for ids in found]
        assert spelled == ["string", " string", "New York", " New York"]
    assert find_bad_words(demo, []) == ()
