"""On-policy distillation (`train.teacher`): the teacher's log-probabilities of the sampled tokens become advantages."""

from torch import Tensor


def distilled_advantages(advantages: Tensor, old_log_probs: Tensor, teacher_log_probs: Tensor, coefficient: float) -> Tensor:
    """`A - c (log_probs_old - teacher_log_probs)`: the reverse KL to the teacher as a reward of every token.

    Source: Thinking Machines Lab, "On-policy distillation", 2025; the single-sample estimate (k1) of the reverse KL.

    Args:
        advantages: [tokens] float32; 0: distillation alone.
        old_log_probs: [tokens] float32, of the student that sampled.
        teacher_log_probs: [tokens] float32.
        coefficient: weight c.

    Returns:
        [tokens] float32, without gradient.
    """
    return (advantages - coefficient * (old_log_probs - teacher_log_probs)).detach()
