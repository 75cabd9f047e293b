"""Which GPUs an engine takes, and what it may do with them."""

from miles_hpc.config import Config
from miles_hpc.rollout.arguments import EngineArguments, server_arguments


def arguments(tmp_path, number: int, placement: str, workers: int = 1) -> EngineArguments:
    (tmp_path / "config.json").write_text('{"eos_token_id": 1}')
    config = Config.model_validate(
        {
            "run": {"name": "t", "steps": 1, "placement": placement},
            "model": {"path": str(tmp_path)},
            "data": {"prompts": "m:f"},
            "rollout": {
                "prompts_per_step": 8,
                "samples_per_prompt": 2,
                "max_new_tokens": 8,
                "reward": "m:f",
                "tensor_parallel": workers,
            },
            "train": {"lr": 1e-4},
            "slurm": {"train": {"nodes": 2, "ranks_per_node": 4}} if placement == "colocate" else {"rollout": {"nodes": 8}},
        }
    )
    return EngineArguments.of(config, tmp_path, number)


def test_engines_of_a_node_take_its_gpus_in_turn(tmp_path):
    """As training ranks do: rank r of training is on GPU r modulo the node's."""
    assert [server_arguments(arguments(tmp_path, n, "colocate", 2), 4)["base_gpu_id"] for n in range(4)] == [0, 2, 0, 2]
    assert [server_arguments(arguments(tmp_path, n, "split"), 4)["base_gpu_id"] for n in range(8)] == [0, 1, 2, 3] * 2
    assert server_arguments(arguments(tmp_path, 5, "split"), 1)["base_gpu_id"] == 0  # Slurm shows the rank one GPU


def test_only_a_colocated_engine_can_give_its_memory_back(tmp_path):
    for placement, sleeps in (("colocate", True), ("split", False)):
        assert server_arguments(arguments(tmp_path, 0, placement), 4)["enable_memory_saver"] is sleeps
