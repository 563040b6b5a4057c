"""A run of transformers.Trainer that stops and resumes: pytest examples/training/test_transformers_resume.py."""

import pytest
import torch
import torch.distributed as dist

from pdlcheck.checks import check_resumed_run

transformers = pytest.importorskip("transformers", reason="the example needs transformers: pip install transformers")
pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate: pip install accelerate")
TOKENS = torch.randint(0, 32, (24, 8), generator=torch.Generator().manual_seed(0))
SAMPLES = [{"input_ids": tokens, "labels": tokens} for tokens in TOKENS]


class StopAndSave(transformers.TrainerCallback):
    def __init__(self, stop_after):
        self.stop_after = stop_after

    def on_step_end(self, args, state, control, **more):
        if state.global_step == self.stop_after:
            control.should_save = control.should_training_stop = True


def run(folder, stop_after, **options):
    arguments = transformers.TrainingArguments(
        str(folder),
        max_steps=6,  # with a stop, too: the learning rate falls to 0 in these steps
        per_device_train_batch_size=8 // dist.get_world_size(),
        learning_rate=0.01,
        use_cpu=True,
        save_strategy="no",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
        **options,
    )
    transformers.set_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(num_attention_heads=2, attention_dropout=0.1, **sizes)
    model = transformers.LlamaForCausalLM(config)
    trainer = transformers.Trainer(model, arguments, train_dataset=SAMPLES, callbacks=[StopAndSave(stop_after)])
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train(resume_from_checkpoint=transformers.trainer_utils.get_last_checkpoint(str(folder)))
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"model": model, "optimizer": trainer.optimizer, "scheduler": trainer.lr_scheduler, "losses": losses}


def test_resumed(world):
    check_resumed_run(run, world, stop_after=2)  # within an epoch of three batches


def test_a_checkpoint_without_the_optimizer_is_found(world):
    def saves_only_the_model(folder, stop_after):
        return run(folder, stop_after, save_only_model=True)

    with pytest.raises(AssertionError, match=r"lost: the state of the optimizer \(AdamW\)"):
        check_resumed_run(saves_only_the_model, world)
