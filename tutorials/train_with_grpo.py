"""
Train with GRPO on samples of a live server
===========================================

GRPO asks a model for several answers to one prompt and teaches it the better ones. The answers come
from an inference server, the lessons happen in a trainer, and after each of them the server needs
the new weights. This tutorial takes the loop of ``examples/grpo_sglang.py`` apart.

What you will learn:

- which parts of TorchRL make the loop, and where this library stands between them;
- how to see that server and trainer are the same policy, and what it looks like if they are not;
- how a sample says which weights made it, also when there were two;
- what the report of a push says;
- what to do when a push fails.

Everything runs on a CPU in about a minute. What is said about samples and versions is checked by an
``assert``. You need ``pip install ".[demo]"`` from a clone.
"""

######################################################################
# An engine and a trainer
# -----------------------
#
# The parts are those of the example; it is short, so keep it open beside this page. The engine is a
# :class:`~weight_update.reference_engine.ReferenceEngine`, a small stand-in for SGLang in a process
# of its own. The trainer has a model of the same kind with other weights.

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from tensordict import TensorDictBase

from weight_update import SGLangWeightSyncScheme, WeightUpdateError, staleness
from weight_update.reference_engine import Fault, ReferenceEngine

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from grpo_sglang import (
    GROUP,
    LEARNED,
    Learner,
    make_buffer,
    make_collector,
    tiny_llama,
    tiny_tokenizer,
    train,
)

as_written = argparse.RawDescriptionHelpFormatter
argparse.ArgumentParser(description=__doc__, formatter_class=as_written).parse_args()

torch.set_num_threads(1)  # leave the other cores to the engine

engine = ReferenceEngine(tiny_llama(seed=1))
model, tokenizer = tiny_llama(seed=0), tiny_tokenizer()
learner = Learner(model, tokenizer)

######################################################################
# Rollouts
# --------
#
# Parts of TorchRL make samples. A dataloader brings prompts, each repeated as often as a group has
# members. A ``ChatEnv`` makes chats of them, and a transform pays for the answers. The policy is a
# client of the server: :class:`~weight_update.SGLangWrapper`, which
# differs from TorchRL's in that its samples say who made them. An ``LLMCollector`` drives it all.

collector = make_collector(engine.url, tokenizer, seed=0)
stream = iter(collector)
strange = next(stream)

sample = strange[0, 0]
print(f"{sample['query']!r} -> {sample['text'].response!r}, paid {sample['next', 'reward'].item()}")
print("made by versions", sample["weight_versions"].response.tolist())

######################################################################
# Version 0 is what the engine was started with: nothing was pushed yet. So these samples were made
# by a policy that is not the trainer's.

assert (strange["weight_versions", "first"] == 0).all()

######################################################################
# Are they the same policy?
# -------------------------
#
# GRPO weighs each token by how much likelier the trainer's policy finds it than the policy that
# sampled it did. ``GRPOLoss`` takes the sampler's log-probability from the sample and works out the
# trainer's, through a ``TransformersWrapper`` that is given the very tokens. The *effective sample
# size* sums it up: 1 if both are the same policy.
#
# ``MCAdvantage`` compares the answers of a group with each other as they enter the replay buffer.


def effective_sample_size(samples: TensorDictBase) -> float:
    buffer = make_buffer()
    buffer.extend(samples.select(*LEARNED))
    with torch.no_grad():
        return float(learner.loss(next(iter(buffer))).ESS)


before = effective_sample_size(strange)

######################################################################
# One push makes the engine the trainer's policy. ``register_collector`` lets the collector count
# pushes too: an update that reached the engine counts once, one that failed does not.

scheme = SGLangWeightSyncScheme(engine.url)
sender = scheme.create_sender()
sender.register_model(model)
sender.register_collector(collector)
report = sender.update_weights()

fresh = next(stream)
after = effective_sample_size(fresh)
print(f"effective sample size: {before:.3f} before the push, {after:.3f} after it")
assert before < 0.999 < after
assert (fresh["weight_versions", "first"] == report.version).all()
assert collector.policy_version == report.version == 1

######################################################################
# If it is not 1 after a push, the trainer sees other tokens than the server did. Usual reasons: the
# text was tokenised twice and came out differently, the chat template of the two ends differs, or
# the server sampled at another temperature, whose log-probabilities are not the policy's. None of
# them raises an error; the loss just teaches nonsense. So the example checks it in its first step.
#
# The loop
# --------
#
# Sample, learn, push. ``train()`` pushes in the background and samples meanwhile, because neither
# needs the other; it waits for the push before it changes the weights.

rewards = train(learner, sender, [collector], steps=3)
assert collector.policy_version == sender.version == 5  # one before the loop, one before its steps

######################################################################
# Its columns are what to watch in a run of your own:
#
# - ``reward`` should rise. Here it takes about ten steps; run the example to see it.
# - ``lag`` is how many updates ago the oldest token was sampled. A batch begun during a push has 1.
# - ``mixed`` counts answers of more than one version.
# - ``ess`` falls when lag grows or the learning rate is too high for it.
# - ``version`` and the pause are the push's.
#
# Answers of two versions
# -----------------------
#
# A push does not wait for answers in flight. With the default pause mode, ``retract``, the engine
# computes anew what they have so far, and goes on with the new weights. Let us ask for longer
# answers, and push while they are being written.

long_answers = iter(make_collector(engine.url, tokenizer, seed=1, answer_tokens=300))


def is_running() -> bool:
    return engine.call("GET", "/v1/loads")["loads"][0]["num_running_reqs"] > 0


def sample_during_a_push() -> TensorDictBase:
    with ThreadPoolExecutor(1) as background:
        sampling = background.submit(next, long_answers)
        while not (is_running() or sampling.done()):
            time.sleep(0.01)
        sender.update_weights()
    return sampling.result()


for _attempt in range(5):  # a push that begins too late catches none
    samples = sample_during_a_push()
    mixed = samples["weight_versions", "mixed"].flatten()
    if mixed.any():
        break

sample = samples.view(-1)[int(mixed.nonzero()[0])]
versions, tokens = sample["weight_versions"].response.unique(return_counts=True)
print(f"{int(mixed.sum())} of {len(mixed)} answers are mixed; one of them:")
print("  tokens by version:", dict(zip(versions.tolist(), tokens.tolist(), strict=True)))
assert versions.tolist() == [sender.version - 1, sender.version]

######################################################################
# Such a sample is of no single policy, but each token of it is: it has the log-probability that the
# version gave it which made it. GRPO's ratio is taken token by token, so it can be learned from.
# :func:`~weight_update.staleness` tells what to leave out if you would
# rather not, or if it became too old. Leave it out after the advantages, or groups lose members:

assert (staleness(samples, sender.version).flatten()[mixed] == 1).all()

buffer = make_buffer()
buffer.extend(samples.select(*LEARNED))
minibatch = next(iter(buffer))
on_policy = minibatch[staleness(minibatch, sender.version) <= 0]
print(f"{len(on_policy)} of {len(minibatch)} samples are of version {sender.version} alone")

######################################################################
# ``docs/rollouts.md`` has what the other pause modes do to answers in flight, and which SGLang
# releases tell versions token by token.
#
# What the report says
# --------------------

report = sender.update_weights()
print(report)

######################################################################
# The first line is size and time: how long the update took, how long engines were paused, and what
# each phase took, in milliseconds. Then comes how the bytes travelled, and each engine with the
# state that it is in. ``report.to_dict()`` has it for a logger.
#
# When a push fails
# -----------------
#
# The engine is told to fail once, in the middle of loading.

fault = {"when": "after_load", "tensors": 5, "times": 1, "message": "no space left"}
engine.inject(Fault("/update_weights_from_distributed", "refuse", **fault))
version, counted = sender.version, collector.policy_version
try:
    sender.update_weights()
except WeightUpdateError as error:
    print(error)
else:
    raise SystemExit("the push should have failed")

######################################################################
# Nobody counted: neither the sender nor the collector. The engine holds a part of each version, so
# it stays paused: requests to it wait, and do not make samples of a policy that never was. In the
# loop, ``push.result()`` raises this error.

assert (sender.version, collector.policy_version) == (version, counted)

######################################################################
# The next push that succeeds sends everything and heals it. ``sender.recover()`` is such a push,
# which also waits for an engine that was restarted. If your run should survive a failed push, catch
# the error, call ``recover()``, and go on sampling.

report = sender.recover()
healed = next(stream)
assert effective_sample_size(healed) > 0.999
assert (healed["weight_versions", "first"] == report.version).all()
print(f"healed: {GROUP} answers to a prompt again, by version {report.version}")

sender.shutdown()
engine.stop()

######################################################################
# Conclusion
# ----------
#
# The loop is TorchRL's; a sender pushes, and samples say who made them. Check the effective sample
# size once, watch lag and reward, and treat a failed push as an engine that waits for the next one.
# The example runs the whole, on your servers too::
#
#     python examples/grpo_sglang.py --server http://a:30000 --model DIR
