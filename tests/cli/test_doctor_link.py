"""What doctor says of NCCL's settings on both ends."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from weight_update.cli.doctor_facts import check_facts
from weight_update.cli.doctor_link import link_findings
from weight_update.engines.probing import ServerFacts
from weight_update.options import UpdateOptions

GPU = ServerFacts("http://a:1", info={"device": "cuda"})


def found(server: ServerFacts, ours: Mapping[str, str]) -> list[tuple[str, str]]:
    return [(finding.level, finding.what) for finding in link_findings(server, ours)]


def test_a_server_on_the_cpu_has_no_such_settings() -> None:
    assert found(ServerFacts("http://a:1", info={"device": "cpu"}), {"NCCL_P2P_DISABLE": "1"}) == []


def test_what_both_ends_tell_nccl_is_shown_and_the_rest_called_unknown() -> None:
    ((level, what),) = found(GPU, {"NCCL_IB_DISABLE": "1"})
    assert level == "unknown"
    assert "here NCCL_IB_DISABLE=1" in what
    assert "sets NCCL_CUMEM_ENABLE=0, NCCL_NVLS_ENABLE=0 unless its environment does" in what


@pytest.mark.parametrize("name", ["NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"])
def test_a_setting_that_both_ends_must_share_is_warned_of(name: str) -> None:
    (level, what), _ = found(GPU, {name: "1"})
    assert level == "warning"
    assert f"this process has {name}=1: NCCL fails unless the server" in what


def test_a_setting_that_disables_nothing_is_not_warned_of() -> None:
    assert [level for level, _ in found(GPU, {"NCCL_P2P_DISABLE": "0"})] == ["unknown"]


def test_the_settings_are_those_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    facts = check_facts(["http://127.0.0.1:1"], UpdateOptions(timeout=5.0))
    assert facts.nccl["NCCL_P2P_DISABLE"] == "1"
    assert "NCCL_DEBUG" not in facts.nccl
