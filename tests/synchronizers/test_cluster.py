"""A static cluster: what NeMo-RL asks of one."""

from __future__ import annotations

import socket

import pytest

from weight_update import WeightUpdateError
from weight_update.synchronizers.facades.cluster import StaticCluster


def test_it_is_as_large_as_it_was_said_to_be():
    assert StaticCluster(4).world_size() == 4


@pytest.mark.parametrize(("given", "counted"), [(None, 4), (2, 2), (8, 4)])
def test_a_node_has_no_more_gpus_than_there_are(given: int | None, counted: int):
    assert StaticCluster(4, num_gpus_per_node=given).num_gpus_per_node == counted


def test_every_call_gives_another_port():
    cluster = StaticCluster(2)
    places = [cluster.get_master_address_and_port() for _ in range(20)]
    places += [cluster.get_available_address_and_port(0, 1) for _ in range(20)]

    assert {address for address, _ in places} == {"127.0.0.1"}
    assert len({port for _, port in places}) == 40


def test_the_port_can_be_bound():
    address, port = StaticCluster(2).get_master_address_and_port()
    with socket.create_server((address, port)):
        pass


@pytest.mark.parametrize("size", [0, -1, True, 1.5, None])
def test_a_size_that_is_none_is_refused(size: object):
    with pytest.raises(WeightUpdateError, match="world_size="):
        StaticCluster(size)


def test_an_address_that_nobody_could_reach_is_refused():
    with pytest.raises(WeightUpdateError, match="cannot be reached"):
        StaticCluster(2, address="0.0.0.0")
