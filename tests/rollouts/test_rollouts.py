"""Answers as SGLang gives them: who made them, and how to get all of them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weight_update.errors import ConfigurationError, WeightUpdateError
from weight_update.rollouts import Span, Versions, is_aborted, retry_aborted, salted, versions_of

Json = dict[str, Any]

LENGTH = {"type": "length", "length": 5}
STOP = {"type": "stop", "matched": 2}
ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
ABORTED_IN_QUEUE = {"type": "abort", "message": "Abort in waiting queue"}


def spans(*bounds: tuple[str, int, int]) -> list[Json]:
    return [{"version": version, "start": start, "end": end} for version, start, end in bounds]


def answer(tokens: int | list[int], reason: Json, labels: Json | None = None, **meta: Any) -> Json:
    """An answer of ``/generate``; without ``labels`` of 0.5.23 under version 6."""
    ids = list(range(tokens)) if isinstance(tokens, int) else tokens
    if labels is None:
        labels = {"weight_version": "6", "weight_versions": spans(("6", 0, len(ids)))}
    info = {"finish_reason": reason, "completion_tokens": len(ids), **labels, **meta}
    return {"text": " w" * len(ids), "output_ids": ids, "meta_info": info}


def openai(*reasons: str | None, metadata: Json | None = None, tokens: int = 5) -> Json:
    """An answer of ``/v1/completions``, with a choice for each finish reason."""
    choices = [{"index": i, "text": " w", "finish_reason": end} for i, end in enumerate(reasons)]
    usage = {"completion_tokens": tokens}
    return {"object": "text_completion", "choices": choices, "usage": usage, "metadata": metadata}


OLDER = {"weight_version": "7"}
TWO = {"weight_version": "7", "weight_versions": spans(("6", 0, 3), ("7", 3, 5))}


# ---- versions


@pytest.mark.parametrize(
    ("given_answer", "expected", "mixed"),
    [
        pytest.param(answer(5, LENGTH), Versions((Span("6", 0, 5),), True), False, id="one"),
        pytest.param(
            answer(5, LENGTH, TWO),
            Versions((Span("6", 0, 3), Span("7", 3, 5)), True),
            True,
            id="two",
        ),
        pytest.param(answer(0, ABORTED), Versions((Span("6", 0, 0),), True), False, id="none yet"),
        pytest.param(
            answer(5, LENGTH, OLDER), Versions((Span("7", 0, 5),), False), False, id="older"
        ),
        pytest.param(
            answer(0, ABORTED, OLDER), Versions((Span("7", 0, 0),), False), False, id="older, none"
        ),
        pytest.param(answer(5, LENGTH, {}), Versions(), False, id="no label"),
        pytest.param(
            openai("length", metadata=TWO),
            Versions((Span("6", 0, 3), Span("7", 3, 5)), True),
            True,
            id="openai",
        ),
        pytest.param(
            openai("length", metadata=OLDER),
            Versions((Span("7", 0, 5),), False),
            False,
            id="openai, older",
        ),
        pytest.param(openai("length"), Versions(), False, id="openai, no label"),
        pytest.param(
            {"index": 0, "finish_reason": "length", "meta_info": TWO},
            Versions((Span("6", 0, 3), Span("7", 3, 5)), True),
            True,
            id="a choice of chat completions",
        ),
    ],
)
def test_the_versions_of_an_answer_are_read(
    given_answer: Json, expected: Versions, mixed: bool
) -> None:
    assert versions_of(given_answer) == expected
    assert versions_of(given_answer).mixed is mixed


def test_spans_of_the_first_choice_are_not_exact_for_all_choices() -> None:
    """SGLang writes the label of the first choice into the metadata of the whole answer."""
    found = versions_of(openai("length", "length", metadata=TWO))
    assert found.spans == (Span("6", 0, 3), Span("7", 3, 5))
    assert not found.exact


@pytest.mark.parametrize(
    "bad",
    [
        spans(("6", 1, 5)),
        spans(("6", 0, 2), ("7", 3, 5)),
        spans(("6", 0, 3), ("7", 3, 2)),
        [{"version": 6, "start": 0, "end": 5}],
        [{"version": "6", "start": "0", "end": 5}],
        [None],
        [],
        "6",
    ],
)
def test_spans_that_make_no_sense_are_not_called_exact(bad: Any) -> None:
    found = versions_of(answer(5, LENGTH, {"weight_version": "7", "weight_versions": bad}))
    assert found == Versions((Span("7", 0, 5),), exact=False)


# ---- aborts


@pytest.mark.parametrize(
    ("given_answer", "expected"),
    [
        (answer(5, LENGTH), False),
        (answer(5, STOP), False),
        (answer(5, ABORTED), True),
        (answer(0, ABORTED_IN_QUEUE, OLDER), True),
        ([answer(5, LENGTH), answer(5, STOP)], False),
        ([answer(5, LENGTH), answer(0, ABORTED)], True),
        ([], False),
        (openai("stop"), False),
        (openai("abort"), True),
        (openai("length", "abort"), True),
        ([openai("stop"), openai("abort")], True),
        ({"index": 0, "finish_reason": "abort"}, True),
        ({"index": 0, "finish_reason": "tool_calls"}, False),
        ({"error": "abort"}, False),
    ],
)
def test_an_answer_that_was_aborted_is_known(given_answer: Any, expected: bool) -> None:
    """C17: with tokens or without, alone or among others."""
    assert is_aborted(given_answer) is expected


# ---- salt


@pytest.mark.parametrize(
    ("request_body", "field", "expected"),
    [
        ({"input_ids": [1]}, "extra_key", "7"),
        ({"text": "w1"}, "extra_key", "7"),
        ({"input_ids": [1], "extra_key": "tenant"}, "extra_key", "tenant|7"),
        ({"input_ids": [[1], [2]], "extra_key": ["a", ""]}, "extra_key", ["a|7", "7"]),
        ({"prompt": "w1"}, "cache_salt", "7"),
        ({"messages": []}, "cache_salt", "7"),
        ({"messages": [], "input_ids": [1]}, "cache_salt", "7"),
        ({"input": "w1"}, "cache_salt", "7"),
        ({"prompt": "w1", "cache_salt": "tenant"}, "cache_salt", "tenant|7"),
    ],
)
def test_a_salted_request_is_a_copy_with_the_version_in_its_cache_key(
    request_body: Json, field: str, expected: Any
) -> None:
    before = dict(request_body)
    assert salted(request_body, 7) == {**request_body, field: expected}
    assert salted(request_body, "7") == salted(request_body, 7)
    assert request_body == before


def test_an_empty_version_is_no_salt() -> None:
    with pytest.raises(ConfigurationError, match="empty version"):
        salted({"text": "w1"}, "")


@given(st.text(), st.text(), st.integers(), st.integers())
def test_different_versions_and_different_keys_never_share_a_prefix(
    one: str, other: str, old: int, new: int
) -> None:
    def key(own: str, version: int) -> object:
        return salted({"text": "w1", "extra_key": own}, version)["extra_key"]

    assert (key(one, old) == key(one, new)) is (old == new)
    assert (key(one, old) == key(other, old)) is (one == other)


# ---- again from the start


class Engine:
    """Gives the listed answers, one a call, and notes what it was asked."""

    def __init__(self, *answers: Any) -> None:
        self.asked: list[Json] = []
        self._answers = list(answers)

    def __call__(self, request: Json) -> Any:
        self.asked.append(request)
        return self._answers.pop(0)


REQUEST: Json = {
    "input_ids": [40, 41],
    "sampling_params": {"max_new_tokens": 5, "ignore_eos": True},
    "rid": "mine",
}


def test_a_whole_answer_is_returned_as_it_came() -> None:
    for keep in (False, True):
        engine = Engine(answer(5, LENGTH, TWO))
        assert retry_aborted(engine, REQUEST, keep=keep) == answer(5, LENGTH, TWO)
        assert engine.asked == [REQUEST]


def test_an_aborted_request_is_asked_again_as_it_was() -> None:
    engine = Engine(answer(3, ABORTED), answer(0, ABORTED_IN_QUEUE), answer(5, LENGTH, OLDER))
    assert retry_aborted(engine, REQUEST) == answer(5, LENGTH, OLDER)
    assert engine.asked == [REQUEST] * 3


@pytest.mark.parametrize(
    "last", [[answer(5, LENGTH), answer(5, STOP)], openai("length", "stop"), openai("stop")]
)
def test_several_completions_are_asked_again_together(last: Any) -> None:
    first = [answer(5, LENGTH), answer(2, ABORTED)]
    assert retry_aborted(Engine(first, last), {"prompt": ["w1", "w2"]}) == last


@pytest.mark.parametrize("keep", [False, True])
def test_the_error_after_the_last_attempt_says_how_many_there_were(keep: bool) -> None:
    engine = Engine(*[answer(0, ABORTED)] * 4)
    with pytest.raises(WeightUpdateError, match="aborted in each of 3 attempts"):
        retry_aborted(engine, REQUEST, attempts=3, keep=keep)
    assert len(engine.asked) == 3


def test_at_least_one_attempt_is_asked_for() -> None:
    with pytest.raises(ConfigurationError, match="at least 1"):
        retry_aborted(Engine(), REQUEST, attempts=0)


@pytest.mark.parametrize(
    "unfinished",
    [None, [], {}, "text", {"error": {"message": "no"}}, answer(3, None), openai(None), [{}]],  # type: ignore[arg-type]
)
@pytest.mark.parametrize("keep", [False, True])
def test_an_answer_that_does_not_tell_how_it_ended_is_never_taken_for_whole(
    unfinished: Any, keep: bool
) -> None:
    with pytest.raises(WeightUpdateError, match="does not tell how it ended"):
        retry_aborted(Engine(unfinished), REQUEST, keep=keep)


def test_what_the_caller_s_own_function_raises_is_raised() -> None:
    def fails(request: Json) -> Any:
        raise ConnectionResetError("gone")

    with pytest.raises(ConnectionResetError, match="gone"):
        retry_aborted(fails, REQUEST)


# ---- on from the tokens that were made


def part(ids: list[int], reason: Json, version: str, exact: bool = True) -> Json:
    labels: Json = {"weight_version": version}
    if exact:
        labels["weight_versions"] = spans((version, 0, len(ids)))
    logprobs = [[-token / 100, token, None] for token in ids]
    return answer(ids, reason, labels, output_token_logprobs=logprobs)


def test_the_rest_is_asked_for_and_the_parts_make_one_answer() -> None:
    engine = Engine(
        part([10, 11], ABORTED, "6"),
        part([], ABORTED_IN_QUEUE, "6"),
        part([12, 13, 14], LENGTH, "7"),
    )
    whole = retry_aborted(engine, REQUEST, keep=True)

    rest = {
        "input_ids": [40, 41, 10, 11],
        "sampling_params": {"max_new_tokens": 3, "ignore_eos": True},
        "rid": "mine",
    }
    assert engine.asked == [REQUEST, rest, rest]
    assert whole["output_ids"] == [10, 11, 12, 13, 14]
    assert versions_of(whole) == Versions((Span("6", 0, 2), Span("7", 2, 5)), exact=True)
    meta = whole["meta_info"]
    assert [token for _, token, _ in meta["output_token_logprobs"]] == whole["output_ids"]
    assert (meta["completion_tokens"], meta["weight_version"]) == (5, "7")
    assert meta["finish_reason"] == LENGTH
    assert not is_aborted(whole)


def test_parts_of_one_version_are_one_span() -> None:
    engine = Engine(part([10, 11], ABORTED, "6"), part([12, 13, 14], LENGTH, "6"))
    whole = retry_aborted(engine, REQUEST, keep=True)
    assert versions_of(whole) == Versions((Span("6", 0, 5),), exact=True)


def test_parts_of_an_older_release_are_told_apart_but_not_called_exact() -> None:
    engine = Engine(part([10, 11], ABORTED, "6", exact=False), part([12], STOP, "7", exact=False))
    whole = retry_aborted(engine, REQUEST, keep=True)
    assert versions_of(whole) == Versions((Span("6", 0, 2), Span("7", 2, 3)), exact=False)
    assert versions_of(whole).mixed


@pytest.mark.parametrize("silent", [0, 1])
def test_a_part_without_a_label_is_not_covered_by_the_label_of_another(silent: int) -> None:
    parts = [part([10, 11], ABORTED, "6"), part([12, 13, 14], LENGTH, "7")]
    for label in ("weight_version", "weight_versions"):
        del parts[silent]["meta_info"][label]
    assert not versions_of(retry_aborted(Engine(*parts), REQUEST, keep=True)).exact


def test_the_prompt_s_figures_are_those_of_the_first_part() -> None:
    first, last = part([10, 11], ABORTED, "6"), part([12, 13, 14], LENGTH, "7")
    first["meta_info"] |= {"prompt_tokens": 2, "cached_tokens": 1, "input_token_logprobs": [[-1]]}
    last["meta_info"] |= {"prompt_tokens": 4, "cached_tokens": 3, "input_token_logprobs": [[-2]]}
    meta = retry_aborted(Engine(first, last), REQUEST, keep=True)["meta_info"]
    assert (meta["prompt_tokens"], meta["cached_tokens"]) == (2, 1)
    assert meta["input_token_logprobs"] == [[-1]]


def test_a_text_put_together_from_parts_would_be_wrong_so_there_is_none() -> None:
    engine = Engine(part([10, 11], ABORTED, "6"), part([12, 13, 14], LENGTH, "7"))
    assert "text" not in retry_aborted(engine, REQUEST, keep=True)


def test_the_last_token_of_a_part_that_may_have_been_an_end_is_made_anew() -> None:
    """SGLang ends a request that is aborted before it looks at the token of that step."""
    request = {"input_ids": [40], "sampling_params": {"max_new_tokens": 5, "min_new_tokens": 2}}
    engine = Engine(part([10, 11, 2], ABORTED, "6"), part([12, 2], STOP, "7"))
    whole = retry_aborted(engine, request, keep=True)
    assert engine.asked[1] == {
        "input_ids": [40, 10, 11],
        "sampling_params": {"max_new_tokens": 3, "min_new_tokens": 0},
    }
    assert whole["output_ids"] == [10, 11, 12, 2]
    assert versions_of(whole).spans == (Span("6", 0, 2), Span("7", 2, 4))
    assert [t for _, t, _ in whole["meta_info"]["output_token_logprobs"]] == [10, 11, 12, 2]


def test_an_abort_in_the_step_of_the_last_token_leaves_nothing_to_ask_for() -> None:
    engine = Engine(part([10, 11, 12], ABORTED, "6"), part([13, 14], ABORTED, "7"))
    whole = retry_aborted(engine, REQUEST, keep=True)
    assert whole["output_ids"] == [10, 11, 12, 13, 14]
    assert whole["meta_info"]["finish_reason"] == LENGTH


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"input_ids": None, "text": "w1"}, "input_ids of one prompt"),
        ({"input_ids": [[1], [2]]}, "input_ids of one prompt"),
        ({"sampling_params": {}}, "max_new_tokens"),
        ({"sampling_params": None}, "max_new_tokens"),
        ({"sampling_params": [{"max_new_tokens": 5}]}, "max_new_tokens"),
        ({"sampling_params": {"max_new_tokens": 5, "n": 2}}, "several completions"),
        ({"sampling_params": {"max_new_tokens": 5, "regex": "a+"}}, "it uses regex"),
        ({"return_hidden_states": True}, "it uses return_hidden_states"),
    ],
)
def test_a_request_that_cannot_go_on_from_its_tokens_is_refused_before_it_is_sent(
    change: Json, told: str
) -> None:
    engine = Engine()
    with pytest.raises(ConfigurationError, match=told):
        retry_aborted(engine, {**REQUEST, **change}, keep=True)
    assert engine.asked == []


@pytest.mark.parametrize("alien", [openai("abort"), [answer(3, ABORTED)]])
def test_tokens_are_kept_of_answers_of_generate_alone(alien: Any) -> None:
    with pytest.raises(WeightUpdateError, match="without tokens to go on from"):
        retry_aborted(Engine(alien), REQUEST, keep=True)


@given(st.lists(st.integers(0, 12), max_size=6), st.booleans())
def test_wherever_it_is_cut_the_whole_is_what_an_uncut_request_says(
    cuts: list[int], ignore_eos: bool
) -> None:
    """Version i makes part i; token k of the output is 100 + k, so a gap would show."""
    wanted, parts = 12, iter(range(100))

    def generate(request: Json) -> Json:
        number, start = next(parts), 98 + len(request["input_ids"])
        left = request["sampling_params"]["max_new_tokens"]
        aborted = number < len(cuts)
        made = min(left, cuts[number]) if aborted else left
        ids = list(range(start, start + made))
        return part(ids, ABORTED if aborted else LENGTH, str(number))

    sampling = {"max_new_tokens": wanted, "ignore_eos": ignore_eos}
    request = {"input_ids": [40, 41], "sampling_params": sampling}
    whole = retry_aborted(generate, request, attempts=len(cuts) + 1, keep=True)

    assert whole["output_ids"] == list(range(100, 100 + wanted))
    found = versions_of(whole)
    assert found.exact
    assert (found.spans[0].start, found.spans[-1].end) == (0, wanted)
    assert len(whole["meta_info"]["output_token_logprobs"]) == wanted


# ---- any answer

NAMES = ["meta_info", "metadata", "choices", "usage", "output_ids", "completion_tokens"]
LABELS = ["finish_reason", "type", "weight_version", "weight_versions", "version", "exact"]
words = st.sampled_from([*NAMES, *LABELS, "start", "end"])
leaves = st.none() | st.booleans() | st.integers(-3, 9) | st.floats() | st.sampled_from(["abort"])
shapes = st.recursive(
    leaves | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(words, inner, max_size=5),
    max_leaves=25,
)


@given(shapes)
def test_no_shape_of_an_answer_breaks_the_readers(shape: Any) -> None:
    assert is_aborted(shape) in (True, False)
    found = versions_of(shape)
    ends = [0, *(span.end for span in found.spans)]
    assert [span.start for span in found.spans] == ends[:-1]
    assert found.spans or not found.exact


@given(shapes, st.booleans())
def test_no_shape_of_an_answer_ends_a_retry_but_with_an_answer_or_a_typed_error(
    shape: Any, keep: bool
) -> None:
    try:
        whole = retry_aborted(Engine(shape, shape, shape), REQUEST, attempts=3, keep=keep)
    except WeightUpdateError:
        return
    assert not is_aborted(whole)
