"""Find the known keyword that was misspelled, or named as other libraries name it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_OTHERS_WORDS = {
    "policy": "every interval frequency freq save_every save_interval save_steps save_freq"
    " save_interval_steps every_n_steps every_n_train_steps checkpoint_interval checkpoint_every"
    " checkpoint_freq steps_per_checkpoint save_strategy",
    "path": "dir directory dirpath folder root location checkpoint_dir checkpoint_path"
    " checkpoint_folder ckpt_dir ckpt_path save_dir save_path output_dir run_dir storage_path file"
    " filename",
    "extras": "extra state states app_state objects scheduler schedulers lr_scheduler scaler"
    " sampler loader dataloader train_loader ema",
    "optimizer": "optim opt optimizers",
    "model": "module modules models net network",
    "threads": "workers num_workers max_workers num_threads",
    "overwrite": "force exist_ok",
    "on_event": "callback callbacks listener",
    "run_id": "run run_name name experiment",
}
_MEANT = {word: known for known, words in _OTHERS_WORDS.items() for word in words.split()}


def near(name: str, known: Iterable[str]) -> str | None:
    """Return the one of `known` that `name` most likely stands for, or None."""
    words = list(known)
    meant = _MEANT.get(name.lower())
    if meant in words:
        return meant
    return next(iter(difflib.get_close_matches(name, words, n=1)), None)
