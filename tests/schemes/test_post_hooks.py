"""Post-hooks: what runs after an update that succeeded, as TorchRL's hooks do, and no engine waits.

Pins: a hook that fails hides that the engines have the weights, so a trainer pushes again (C07).
"""

from __future__ import annotations

import copy
import functools
import logging
import pickle
import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest

from tests.schemes.told import failure, made_up, report_of
from weight_update import ConfigurationError, EngineRejected, SGLangWeightSyncScheme, UpdateReport

WAIT = 30.0


def test_hooks_run_in_the_order_of_their_registration_after_each_update() -> None:
    sender, _ = made_up()
    heard: list[str] = []
    for name in ("first", "second"):
        sender.register_post_hook(functools.partial(heard.append, name))

    sender.update_weights({})
    sender.update_weights({})

    assert heard == ["first", "second"] * 2


def test_a_hook_runs_as_often_as_it_was_registered() -> None:
    sender, _ = made_up()
    heard: list[int] = []

    def hook() -> None:
        heard.append(1)

    sender.register_post_hook(hook)
    sender.register_post_hook(hook)

    sender.update_weights({})

    assert heard == [1, 1]


def no_arguments(heard: list[Any]) -> Callable[..., Any]:
    return lambda: heard.append("nothing")


def own_default(heard: list[Any]) -> Callable[..., Any]:
    """A closure over a loop's variable, as TorchRL's users write it."""
    return lambda value="its own": heard.append(value)


def any_arguments(heard: list[Any]) -> Callable[..., Any]:
    return lambda *given, **named: heard.append((given, named))


def one_argument(heard: list[Any]) -> Callable[..., Any]:
    def hook(report: UpdateReport) -> None:
        heard.append(report)

    return hook


def one_and_a_default(heard: list[Any]) -> Callable[..., Any]:
    return lambda report, into=heard: into.append(report)


def method(heard: list[Any]) -> Callable[..., Any]:
    class Watcher:
        def updated(self, report: UpdateReport) -> None:
            heard.append(report)

    return Watcher().updated


def builtin(heard: list[Any]) -> Callable[..., Any]:
    return heard.append


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (no_arguments, "nothing"),
        (own_default, "its own"),
        (any_arguments, ((), {})),
        (one_argument, report_of(1)),
        (one_and_a_default, report_of(1)),
        (method, report_of(1)),
        (builtin, report_of(1)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_only_a_hook_that_needs_an_argument_gets_the_report(
    make: Callable[[list[Any]], Callable[..., Any]], expected: Any
) -> None:
    sender, _ = made_up()
    heard: list[Any] = []
    sender.register_post_hook(make(heard))

    sender.update_weights({})

    assert heard == [expected]


async def awaited() -> None: ...


@pytest.mark.parametrize(
    "hook", [None, 3, "print", lambda a, b: None, lambda *, named: None, awaited], ids=str
)
def test_what_cannot_be_called_so_is_no_hook(hook: Any) -> None:
    sender, _ = made_up()

    with pytest.raises(ConfigurationError, match="post-hook"):
        sender.register_post_hook(hook)


def test_no_hook_runs_after_a_failed_update() -> None:
    sender, transport = made_up()
    hook = Mock()
    sender.register_post_hook(hook)
    transport.ends = [failure(report_of(0))]

    with pytest.raises(EngineRejected):
        sender.update_weights({})
    assert not hook.called

    sender.update_weights({})
    assert hook.call_count == 1


UPDATES: dict[str, Callable[[Any], Any]] = {
    "update_weights": lambda sender: sender.update_weights({}),
    "update_weights_async": lambda sender: sender.update_weights_async({}).result(WAIT),
    "recover": lambda sender: sender.recover(),
}


@pytest.mark.parametrize("update", UPDATES.values(), ids=UPDATES)
def test_hooks_have_run_when_an_update_of_any_kind_is_over(
    update: Callable[[Any], UpdateReport],
) -> None:
    sender, _ = made_up()
    heard: list[UpdateReport] = []
    sender.register_post_hook(heard.append)

    report = update(sender)

    assert heard == [report]


def test_an_update_that_a_newer_one_replaces_has_no_hooks_of_its_own() -> None:
    sender, transport = made_up()
    began, go_on, heard = threading.Event(), threading.Event(), []
    transport.during = lambda: (began.set(), go_on.wait(WAIT))
    sender.register_post_hook(lambda report: heard.append(report.version))

    futures = [sender.update_weights_async({})]
    assert began.wait(WAIT)
    futures += [sender.update_weights_async({}), sender.update_weights_async({})]
    go_on.set()

    assert [future.result(WAIT).version for future in futures] == [1, 2, 2]
    assert heard == [1, 2]


def test_a_hook_that_fails_is_warned_of_and_the_update_stands(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The engines generate with the new weights: an error would make a trainer push them again."""
    sender, _ = made_up()

    def broken() -> None:
        raise OSError("disk full")

    hook = Mock()
    sender.register_post_hook(broken)
    sender.register_post_hook(hook)

    with caplog.at_level(logging.WARNING, "weight_update"):
        first, second = sender.update_weights({}), sender.update_weights({})

    assert hook.call_count == 2
    for version, report in enumerate((first, second), start=1):
        (warning,) = report.warnings
        for words in ("broken", "OSError", "disk full", f"version {version}"):
            assert words in warning
    (record,) = caplog.records  # the log has it once, with the place
    assert record.exc_info


def test_an_interrupt_inside_a_hook_comes_through() -> None:
    sender, _ = made_up()
    sender.register_post_hook(Mock(side_effect=KeyboardInterrupt))

    with pytest.raises(KeyboardInterrupt):
        sender.update_weights({})


def test_a_hook_that_is_registered_while_an_update_runs_is_heard_after_it() -> None:
    sender, transport = made_up()
    hook = Mock()

    transport.during = lambda: sender.register_post_hook(hook)
    sender.update_weights({})

    assert hook.call_count == 1


def test_a_hook_that_a_hook_registers_runs_from_the_next_update_on() -> None:
    sender, _ = made_up()
    late = Mock()
    sender.register_post_hook(lambda: sender.register_post_hook(late) if not late.called else None)

    sender.update_weights({})
    assert late.call_count == 0

    sender.update_weights({})
    assert late.call_count == 1


def test_hooks_can_be_registered_from_many_threads_while_updates_run() -> None:
    sender, _ = made_up()
    hook = Mock()

    def register() -> None:
        for _ in range(50):
            sender.register_post_hook(hook)

    threads = [threading.Thread(target=register) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(5):
        sender.update_weights({})
    for thread in threads:
        thread.join(WAIT)
    hook.reset_mock()

    sender.update_weights({})

    assert hook.call_count == 200


def test_a_hook_may_update_in_turn() -> None:
    sender, _ = made_up()
    sender.register_post_hook(
        lambda report: sender.update_weights({}) if report.version < 3 else None
    )

    sender.update_weights({})

    assert sender.version == 3


def test_a_hook_may_shut_the_sender_down() -> None:
    sender, _ = made_up()
    later = Mock()
    sender.register_post_hook(sender.shutdown)
    sender.register_post_hook(later)

    sender.update_weights({})
    assert later.call_count == 1  # it had been promised this one

    sender.update_weights({})
    assert later.call_count == 1


def test_shutdown_forgets_hooks() -> None:
    sender, _ = made_up()
    hook = Mock()
    sender.register_post_hook(hook)

    sender.shutdown()
    sender.update_weights({})

    assert not hook.called


@pytest.mark.parametrize(
    "rebuild", [lambda x: pickle.loads(pickle.dumps(x)), copy.deepcopy], ids=["pickle", "deepcopy"]
)
def test_hooks_and_loggers_stay_with_the_process_that_registered_them(rebuild: Any) -> None:
    """C78: and what cannot be pickled keeps no sender from crossing."""
    sender = SGLangWeightSyncScheme("http://a:1").create_sender()
    sender.register_post_hook(lambda: None)
    sender.register_logger(Mock(lock=threading.Lock()))

    twin = rebuild(sender)

    twin.register_post_hook(lambda: None)
    assert list(twin.engines) == list(sender.engines)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
@pytest.mark.parametrize("of", ["sender", "scheme"])
def test_who_hears_of_an_update_does_not_hear_of_those_of_a_copy(copied: Any, of: str) -> None:
    scheme = SGLangWeightSyncScheme("http://a:1")
    heard: list[UpdateReport] = []

    def hook(report: UpdateReport) -> None:
        heard.append(report)

    original: Any = {"sender": scheme.create_sender(), "scheme": scheme}[of]
    original.register_post_hook(hook)

    twin = copied(original)
    listeners = twin.listeners if of == "scheme" else twin._listeners
    listeners.hear(lambda: report_of(1), version=0)

    assert not heard
