"""What the library learns of a real server: who it is, what it can load, and what it holds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from weight_update.engines.sglang.engine import SGLangEngine
from weight_update.facts import Digests, NameCheck
from weight_update.options import HttpOptions, PauseMode
from weight_update.waiting import Deadline
from weight_update.weights.extract import extract_weights

from .conftest import Older
from .long_request import LongRequest
from .models import SEED_A, SEED_B, TinyModels, tiny_llama
from .served import Served, sender_of
from .sglang_server import SGLangServer

MODES: tuple[PauseMode, ...] = ("retract", "in_place", "abort")
OLDER = ["0.5.15.post1", "0.5.9"]
PROMPT = [3, 14, 15, 92, 65]
HEAD = "lm_head.weight"


def soon() -> Deadline:
    return Deadline(60)


@contextmanager
def inspected(server: SGLangServer) -> Iterator[SGLangEngine]:
    engine = SGLangEngine(server.url, HttpOptions())
    try:
        engine.inspect(soon())
        yield engine
    finally:
        engine.close()


@contextmanager
def paused_under_load(server: SGLangServer, mode: PauseMode) -> Iterator[None]:
    """A server that was paused while a request ran."""
    request = LongRequest(server.url, PROMPT)
    request.wait_for(4)
    server.post("pause_generation", {"mode": mode})
    try:
        yield
    finally:
        server.post("continue_generation", {})
        request.end() if mode == "abort" else request.cut()


def names_of(model: Any) -> list[str]:
    return [weight.spec.name for weight in extract_weights(model)]


def first_row(model: Any, name: str) -> tuple[float, ...]:
    """What a server shows of a tensor: its first row, or the first number of a vector."""
    value = model.get_parameter(name).detach()
    return tuple((value[0] if value.dim() > 1 else value[:1]).float().tolist())


# ---- who it is


@pytest.mark.parametrize("mode", MODES)
def test_it_is_not_ready_while_it_is_paused_and_the_same_instance(
    sglang_at_a: SGLangServer, mode: PauseMode
) -> None:
    with inspected(sglang_at_a) as engine:
        before = engine.observe(soon())
        with paused_under_load(sglang_at_a, mode):
            paused = engine.observe(soon())
        after = engine.observe(soon())

    assert before.ready is True
    assert before.instance is not None
    assert paused == replace(before, ready=False)
    assert after == before


def test_its_label_is_seen(sglang_at_a: SGLangServer) -> None:
    with inspected(sglang_at_a) as engine:
        engine.stamp("41", soon())
        assert engine.observe(soon()).label == "41"


def test_it_has_no_workers(sglang: SGLangServer) -> None:
    with inspected(sglang) as engine:
        assert engine.workers(soon()) == ()


def test_servers_of_one_layout_are_two_instances(sglang: SGLangServer, spare: SGLangServer) -> None:
    with inspected(sglang) as one, inspected(spare) as other:
        assert one.layout == other.layout
        assert one.layout is not None
        assert one.observe(soon()).instance != other.observe(soon()).instance


# ---- what it can load


def test_the_names_of_its_own_model_are_all_known_and_complete(at_a: Served) -> None:
    with inspected(at_a.server) as engine:
        found = engine.check_names(names_of(at_a.model(SEED_B)), soon())

    assert found == NameCheck(known=True)


def test_a_head_that_a_tied_model_sends_too_is_no_alarm(at_a: Served) -> None:
    if at_a.family != "qwen2":
        pytest.skip("only the Qwen2 is tied")
    with inspected(at_a.server) as engine:
        assert engine.check_names([*names_of(at_a.model(SEED_B)), HEAD], soon()).unknown == ()


def test_names_that_it_would_ignore_are_told_and_so_is_what_stays_old(at_a: Served) -> None:
    names = [f"policy.{name}" for name in names_of(at_a.model(SEED_B))]
    right = names_of(at_a.model(SEED_B))[1:]
    with inspected(at_a.server) as engine:
        wrapped = engine.check_names(names, soon())
        short = engine.check_names([*right, "v_head.weight"], soon())

    assert set(wrapped.unknown) == set(names)
    assert wrapped.lacking
    assert short.unknown == ("v_head.weight",)
    assert short.lacking == ("model.embed_tokens.weight",)


def test_the_head_of_an_untied_model_must_come(sglang_at_a: SGLangServer) -> None:
    names = [name for name in names_of(tiny_llama(SEED_B)) if name != HEAD]
    with inspected(sglang_at_a) as engine:
        assert engine.check_names(names, soon()) == NameCheck(known=True, lacking=(HEAD,))


# ---- what it holds


def test_its_digests_change_with_its_weights_and_come_back_with_them(at_a: Served) -> None:
    with inspected(at_a.server) as engine, sender_of(at_a) as sender:
        sender.update_weights(at_a.model(SEED_A))
        a = engine.digests(soon())
        sender.update_weights(at_a.model(SEED_B))
        b = engine.digests(soon())
        sender.update_weights(at_a.model(SEED_A))
        again = engine.digests(soon())

    assert a is not None
    assert b is not None
    assert a == again
    assert (len(a.ranks), a.parts) == (1, None)
    changed = {name for name, digest in b.ranks[0].items() if a.ranks[0][name] != digest}
    # Norms of new models are all ones.
    assert changed == {name for name in a.ranks[0] if "norm" not in name}


def test_servers_that_hold_equal_weights_show_equal_digests(
    sglang_at_a: SGLangServer, spare: SGLangServer, tiny_models: TinyModels
) -> None:
    with inspected(sglang_at_a) as one, inspected(spare) as other:
        assert one.digests(soon()) == other.digests(soon())
        spare.load(tiny_models.b)
        assert one.digests(soon()) != other.digests(soon())


@pytest.mark.parametrize("mode", MODES)
def test_its_digests_can_be_read_while_it_is_paused(
    sglang_at_a: SGLangServer, mode: PauseMode
) -> None:
    with inspected(sglang_at_a) as engine:
        before = engine.digests(soon())
        with paused_under_load(sglang_at_a, mode):
            assert isinstance(engine.digests(soon()), Digests)
            assert engine.digests(soon()) == before


def test_the_first_values_of_every_weight_are_those_of_the_trainer(
    sglang_at_a: SGLangServer,
) -> None:
    model = tiny_llama(SEED_A)
    with inspected(sglang_at_a) as engine:
        held = {name: engine.first_values(name, soon()) for name in names_of(model)}

    assert held == {name: first_row(model, name) for name in names_of(model)}


@pytest.mark.parametrize("mode", MODES)
def test_first_values_can_be_read_while_it_is_paused(
    sglang_at_a: SGLangServer, mode: PauseMode
) -> None:
    with inspected(sglang_at_a) as engine, paused_under_load(sglang_at_a, mode):
        assert engine.first_values(HEAD, soon()) == first_row(tiny_llama(SEED_A), HEAD)


def test_values_are_read_in_the_servers_own_dtype_or_not_at_all(at_a: Served) -> None:
    model = at_a.model(SEED_A)
    with inspected(at_a.server) as engine:
        values = engine.first_values("model.embed_tokens.weight", soon())
        nobody = engine.first_values("nobody.weight", soon())

    llama = at_a.family == "llama"
    assert values == (first_row(model, "model.embed_tokens.weight") if llama else None)
    assert nobody is None


# ---- older releases


@pytest.mark.parametrize("older", OLDER, indirect=True)
def test_an_older_release_shows_what_it_can(older: Older, older_at_a: SGLangServer) -> None:
    model = tiny_llama(SEED_A)
    with inspected(older_at_a) as engine:
        seen = engine.observe(soon())
        assert seen.ready is None
        assert seen.instance is not None
        assert engine.workers(soon()) == ()
        assert engine.layout is not None
        assert engine.digests(soon()) is None  # the one has none, the other none on a CPU
        assert engine.check_names(names_of(model), soon()) == NameCheck()
        held = {name: engine.first_values(name, soon()) for name in names_of(model)}

    assert held == {name: first_row(model, name) for name in names_of(model)}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("older", OLDER, indirect=True)
def test_an_older_release_can_be_looked_at_while_it_is_paused(
    older_at_a: SGLangServer, mode: PauseMode
) -> None:
    with inspected(older_at_a) as engine:
        before = engine.observe(soon())
        with paused_under_load(older_at_a, mode):
            assert engine.observe(soon()) == before
            assert engine.first_values(HEAD, soon()) == first_row(tiny_llama(SEED_A), HEAD)


@pytest.mark.parametrize("older", OLDER, indirect=True)
def test_an_older_release_that_started_anew_is_another_instance(older: Older) -> None:
    assert is_another_instance_after_a_restart(older.server)


def test_a_server_that_started_anew_is_another_instance(spare: SGLangServer) -> None:
    assert is_another_instance_after_a_restart(spare)


def is_another_instance_after_a_restart(server: SGLangServer) -> bool:
    with inspected(server) as engine:
        engine.stamp("41", soon())
        before = engine.observe(soon())
        server.stop()
        server.start()
        after = engine.observe(soon())
    return (before.label, after.label) == ("41", "default") and before.instance != after.instance
