"""TRL's trainers take the config of an LSR adapter as they take LoRA's."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")
trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

from peft import PeftModel  # noqa: E402
from tiny_language_model import tiny_model  # noqa: E402
from tiny_tokenizer import word_tokenizer  # noqa: E402

from lsrdecomp.lora.peft import LsrConfig  # noqa: E402

ROWS = {
    "sft": {"prompt": "user one", "completion": "two two"},
    "dpo": {"prompt": "user one", "chosen": "two two", "rejected": "three"},
}


def arguments(kind, folder):
    """Return the arguments of three steps of a trainer on the CPU."""
    config = {"sft": trl.SFTConfig, "dpo": trl.DPOConfig}[kind]
    return config(
        output_dir=str(folder),
        max_steps=3,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        report_to="none",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        save_strategy="no",
    )


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_three_steps_of_a_trainer_move_the_factors(kind, tmp_path):
    trainer = {"sft": trl.SFTTrainer, "dpo": trl.DPOTrainer}[kind](
        model=tiny_model(layers=1),
        args=arguments(kind, tmp_path),
        train_dataset=datasets.Dataset.from_list([ROWS[kind]] * 12),
        processing_class=word_tokenizer(),
        peft_config=LsrConfig(
            r=4, separation_rank=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
        ),
    )
    before = {
        name: parameter.detach().clone()
        for name, parameter in trainer.model.named_parameters()
        if parameter.requires_grad
    }
    assert before
    assert all(".lsr_" in name for name in before)
    trainer.train()
    moved = dict(trainer.model.named_parameters())
    assert all(not torch.equal(moved[name], value) for name, value in before.items())
    trainer.save_model(str(tmp_path / "adapter"))
    PeftModel.from_pretrained(tiny_model(layers=1), tmp_path / "adapter")
