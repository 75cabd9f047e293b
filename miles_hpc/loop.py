"""The algorithm, as each side of the world runs it. Both count the same steps and meet at every version of the weights.

rollout ranks                                    training ranks
receive weights of version `step`        <----   publish
generate, score, write shards            ---->   collect
                                                 advantages, optimizer steps
receive weights of version `step + 1`    <----   publish, then checkpoint while the engines generate
"""

from typing import TYPE_CHECKING

from miles_hpc.errors import Stopped

if TYPE_CHECKING:  # a rollout rank loads no Megatron, a training rank no engine
    from miles_hpc.rollout.role import RolloutRole
    from miles_hpc.train.role import TrainRole


def train(role: "TrainRole") -> str:
    """Run a training rank to the end; returns the verdict's kind: `done` or `preempted`."""
    try:
        return _train(role)
    except Stopped:  # in the middle of a step, all training ranks at the same place
        role.leave()
        return "preempted"


def rollout(role: "RolloutRole") -> str:
    """Run a rollout rank to the end; returns the verdict's kind: `done` or `preempted`."""
    try:
        return _rollout(role)
    except Stopped:
        return "preempted"


def _train(role: "TrainRole") -> str:
    step = role.start()
    role.publish(step)
    while step < role.steps and not role.stopping:
        collected = role.collect(step)
        advantages = role.advantages(collected.samples)
        result = role.update(collected.samples, advantages, step)
        role.keep(step, collected, advantages, result)
        step += 1
        role.publish(step)
        role.checkpoint(step)
        role.report(step - 1)
    if role.stopping:
        return "preempted"
    role.export()
    return "done"


def _rollout(role: "RolloutRole") -> str:
    step = role.start()
    role.receive(step)
    while step < role.steps:
        role.receive(step - role.staleness)
        role.generate(step)
        step += 1
    role.receive(role.steps)
    return "done"
