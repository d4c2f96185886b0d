"""The tunable numbers of self-distillation: how chats are written, and how a student is optimized."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChatPolicy:
    """How a model writes chats with itself. Lengths are in tokens."""

    max_user_tokens: int = 160  # of one turn; longer turns teach less, as only answers are learned from
    max_answer_tokens: int = 224  # of one turn; longer answers mean fewer chats and subjects per hour
    max_chat_tokens: int = 640  # at which a chat ends
    max_template_tokens: int = 192  # reserved beyond `max_chat_tokens` for the template's own tokens
    min_user_tokens: int = 4  # a chat whose user writes less is dropped
    second_turn_prob: float = 0.3  # fraction of the chats with a second question
    whole_prompt_prob: float = 0.6  # fraction of the chats that begin with one of `whole_prompts`
    user_temperature: float = 0.8  # higher gives more varied questions, and more nonsense
    answer_temperatures: tuple[float, ...] = (0.0, 0.0, 0.6, 1.0)  # sampled evenly: most people generate greedily
    loop_tokens: int = 48  # an answer ends when so many tokens only repeat a shorter run ...
    loop_check_tokens: int = 16  # ... which is checked each time it has grown by so many


@dataclass(frozen=True, slots=True)
class OptimizerPolicy:
    """Hyperparameters of a student."""

    batch_chats: int = 8  # chats per step
    peak_learning_rate: float = 2e-3  # each recipe's own
    min_learning_rate: float = 0.02  # at the end, as a fraction of the peak
    warmup_steps: int = 30
    weight_decay: float = 0.01  # of matrices
    betas: tuple[float, float] = (0.9, 0.95)  # AdamW
    max_grad_norm: float = 1.0
    mixed_precision: bool = True  # products in bf16: twice as fast where the processor has it
    top1_weight: float = 0.3  # extra loss on the teacher's first choice, which decides acceptance
    level_decay: float = 0.8  # loss weight per level further ahead, which is accepted less often
    average_decay: float = 0.98  # EWMA of the weights per step: higher is smoother and lags more
    length_jitter: float = (
        40.0  # tokens of noise when chats are sorted by length: less saves padding, and shuffles less
    )
    initial_logit_scales: tuple[float, ...] = (1.0, 0.7, 0.5, 0.35, 0.25, 0.15, 0.1)  # tried before the first step
    holdout_every: int = 16  # one chat in so many is only validated on
