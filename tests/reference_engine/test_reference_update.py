"""Weights arrive over the group, or are refused in the real server's words."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from weight_update.reference_engine.group import GroupAddress

pytestmark = pytest.mark.usefixtures("clean")


@pytest.fixture
def session(engine, kit):
    assert kit.post(engine, "/begin_weight_update").status == 200
    yield
    kit.post(engine, "/end_weight_update")


def output(engine, kit, tokens=24):
    return engine.generate(kit.PROMPT, max_new_tokens=tokens)["output_ids"]


@pytest.mark.parametrize("flat", [False, True], ids=["one broadcast a name", "flattened bucket"])
def test_an_update_turns_the_output_into_model_b_exactly(
    engine, trainer, kit, model_a, model_b, flat
):
    assert output(engine, kit) == kit.greedy(model_a, kit.PROMPT, 24)
    reply = trainer.update(model_b, flat=flat, flush_cache=True)
    assert (reply.status, reply.message) == (200, "Succeeded to update parameter online.")
    assert output(engine, kit) == kit.greedy(model_b, kit.PROMPT, 24)


def test_an_update_outside_a_session_is_refused_without_joining(engine, trainer, model_b):
    reply = trainer.announce(dict(model_b.named_parameters()))
    assert reply.status == 400
    assert "must run between begin_weight_update() and end_weight_update()" in reply.message


def test_a_second_begin_is_refused(engine, kit, session):
    reply = kit.post(engine, "/begin_weight_update")
    assert reply.status == 400
    assert "a weight-update session is already open" in reply.message


def test_an_end_without_a_begin_is_refused(engine, kit):
    reply = kit.post(engine, "/end_weight_update")
    assert reply.status == 400
    assert "no weight-update session is open" in reply.message


def test_an_unknown_group_is_refused_and_the_known_one_still_works(trainer, session, model_b):
    tensors = dict(model_b.named_parameters())
    reply = trainer.announce(tensors, group_name="nobody")
    assert reply.status == 400
    assert "Failed to receive weights: Group nobody not in" in reply.message
    assert trainer.send(tensors).status == 200


@pytest.mark.parametrize("dtype", ["torch.float32", "nonsense"])
def test_a_dtype_that_is_no_bare_torch_name_is_refused_without_joining(
    trainer, session, model_b, dtype
):
    tensors = dict(model_b.named_parameters())
    reply = trainer.announce(tensors, dtypes=[dtype] * len(tensors))
    assert reply.status == 400
    assert reply.message.startswith("Failed to receive weights: ")
    assert trainer.send(tensors).status == 200


def test_a_bucket_with_lists_of_unequal_length_is_refused_without_joining(
    trainer, session, model_b
):
    tensors = dict(model_b.named_parameters())
    reply = trainer.announce(tensors, shapes=[[1]], load_format="flattened_bucket")
    assert reply.status == 400
    assert trainer.send(tensors, flat=True).status == 200


def test_a_bucket_whose_offsets_do_not_fit_the_dtype_is_refused(trainer, session):
    tensors = {"a": torch.zeros(1, dtype=torch.uint8), "b": torch.zeros(1)}
    reply = trainer.announce(tensors, load_format="flattened_bucket")
    assert reply.status == 400
    assert "b: offset 1 does not fit" in reply.message


def test_a_wrong_shape_leaves_the_model_partly_updated(engine, trainer, kit, session, model_b):
    tensors = dict(model_b.named_parameters())
    tensors["lm_head.weight"] = torch.zeros(3, 3)
    reply = trainer.send(tensors)
    assert reply.status == 400
    assert reply.message.startswith("Failed to update parameter online: ")
    assert "partially updated. Please discard the whole weights." in reply.message
    name = "model.embed_tokens.weight"
    rows = kit.post(engine, "/get_weights_by_name", name=name, truncate_size=2).json
    assert rows == tensors[name][:2].tolist()


def test_an_unknown_name_is_answered_200_and_only_logged(engine, trainer, kit, session):
    assert trainer.send({"model.nothing.weight": torch.zeros(2)}).status == 200
    # The answer does not wait for what is done with the bytes.
    kit.wait_for(lambda: "Parameter model.nothing.weight not found" in engine.log())


def test_another_dtype_on_the_wire_is_cast(engine, trainer, kit, session, model_b):
    name = "model.norm.weight"
    half = model_b.get_parameter(name).to(torch.bfloat16) * 0.7
    assert trainer.send({name: half}).status == 200
    assert kit.post(engine, "/get_weights_by_name", name=name).json == half.float().tolist()


@pytest.mark.parametrize("flat", [False, True], ids=["one by one", "bucket"])
def test_tensors_of_several_dtypes_may_come_together(engine, trainer, kit, session, model_b, flat):
    names = ["model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"]
    dtypes = [torch.float64, torch.bfloat16, torch.float32]
    pairs = zip(names, dtypes, strict=True)
    tensors = {name: model_b.get_parameter(name).to(dtype) for name, dtype in pairs}
    order = dict(sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize))
    assert trainer.send(order if flat else tensors, flat=flat).status == 200
    for name, tensor in tensors.items():
        rows = kit.post(engine, "/get_weights_by_name", name=name).json
        assert rows == tensor[:100].float().tolist()


def test_lists_of_unequal_length_are_cut_to_the_shortest(trainer, session, model_b):
    name = "model.norm.weight"
    reply = trainer.send({name: model_b.get_parameter(name)}, names=[name, "lm_head.weight"])
    assert reply.status == 200


def test_missing_fields_are_refused_in_the_servers_envelope(engine, kit):
    reply = kit.post(engine, "/update_weights_from_distributed", names=[])
    assert reply.status == 400
    assert reply.json["object"] == "error"
    assert "validation errors: " in reply.message
    assert "body.shapes: Field required" in reply.message


def test_the_name_of_a_live_group_cannot_be_used_again(engine, trainer, kit):
    reply = kit.post(
        engine,
        "/init_weights_update_group",
        master_address="127.0.0.1",
        master_port=trainer.store.port,
        rank_offset=1,
        world_size=2,
        group_name=trainer.name,
        backend="gloo",
    )
    assert reply.status == 400
    assert "has already been created" in reply.message


def test_a_group_that_does_not_exist_cannot_be_destroyed(engine, kit):
    reply = kit.post(engine, "/destroy_weights_update_group", group_name="nobody")
    assert (reply.status, reply.message) == (400, "The group to be destroyed does not exist.")


def test_a_version_sent_with_the_update_becomes_the_label(engine, trainer, kit, model_b):
    reply = trainer.update(model_b, weight_version="7")
    assert reply.message.endswith("Weight version updated to 7.")
    assert kit.get(engine, "/model_info").json["weight_version"] == "7"
    meta = engine.generate(kit.PROMPT, max_new_tokens=3)["meta_info"]
    assert meta["weight_versions"] == [{"version": "7", "start": 0, "end": 3}]


def test_server_info_keeps_the_version_of_the_start(engine, trainer, kit, model_b):
    trainer.update(model_b, weight_version="7")
    assert kit.get(engine, "/server_info").json["weight_version"] == "default"


def test_the_checksum_changes_with_the_weights_and_comes_back_with_them(
    engine, trainer, kit, model_a, model_b
):
    def checksum():
        return kit.get(engine, "/weights_checker").json["per_engine_checksum"]

    before = checksum()
    trainer.update(model_b)
    assert checksum() != before
    trainer.update(model_a)
    assert checksum() == before


def test_an_update_leaves_a_stale_prefix_until_somebody_flushes(engine, trainer, kit, model_b):
    output(engine, kit)
    trainer.update(model_b, flush_cache=False)
    expected = kit.greedy(model_b, kit.PROMPT, 24)
    assert output(engine, kit) != expected
    assert kit.post(engine, "/flush_cache").status == 200
    assert output(engine, kit) == expected


def test_generation_waits_while_the_scheduler_sits_in_a_broadcast(
    engine, trainer, kit, session, model_b
):
    name = "model.norm.weight"
    tensor = model_b.get_parameter(name).detach()
    with kit.background() as start:
        update = start(trainer.announce, {name: tensor})
        kit.wait_for(lambda: engine.requests()[-1]["path"].endswith("_distributed"))
        held = start(engine.generate, kit.PROMPT)
        assert kit.get(engine, "/model_info").status == 200
        assert kit.stays_open(held)
        dist.broadcast(tensor, src=0, group=trainer.group)
        assert update.result().status == 200
        assert len(held.result()["output_ids"]) == 16


def test_a_health_call_that_gave_up_does_no_harm(engine, trainer, kit, session, model_b):
    name = "model.norm.weight"
    tensor = model_b.get_parameter(name).detach()
    with kit.background() as start:
        update = start(trainer.announce, {name: tensor})
        kit.wait_for(lambda: engine.requests()[-1]["path"].endswith("_distributed"))
        assert kit.get(engine, "/health").status == 503
        dist.broadcast(tensor, src=0, group=trainer.group)
        assert update.result().status == 200
    assert kit.get(engine, "/health").status == 200


def test_an_ipv6_address_is_put_in_brackets():
    address = GroupAddress("::1", 29500, 1, 2, "group", "gloo")
    assert address.url == "tcp://[::1]:29500"


def test_a_trainer_that_goes_away_leaves_old_weights_and_a_group_to_destroy(
    engine, kit, session, model_a, model_b
):
    leaver = kit.Trainer(engine)
    with kit.background() as start:
        update = start(leaver.announce, dict(model_b.named_parameters()))
        kit.wait_for(lambda: engine.requests()[-1]["path"].endswith("_distributed"))
        dist.destroy_process_group(leaver.group)
        del leaver.group
        reply = update.result()
    assert reply.status == 400
    assert reply.message.startswith("Failed to receive weights: ")
    assert output(engine, kit) == kit.greedy(model_a, kit.PROMPT, 24)
    gone = kit.post(engine, "/destroy_weights_update_group", group_name=leaver.name)
    assert gone.status == 200
