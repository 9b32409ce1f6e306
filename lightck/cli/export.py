"""`lightck export`: write a snapshot as a safetensors file or as a torch.save file."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightck.cli.arguments import add_step, rows_at, step_of, with_history
from lightck.cli.atomic_file import replaced
from lightck.cli.output import OK, Refusal, print_json, progress, size
from lightck.load import load, load_tensors, region_files

DESCRIPTION = """\
Write a snapshot, its checksums verified, to the file OUT. The suffix says the format: .safetensors,
or .pt, .pth, .bin for torch.save.

safetensors: the model's tensors; with --all also the optimizers' and the extras', under flat names
  (optim/0/<parameter>/exp_avg). Of tied tensors one is written; the file's metadata names the
  others, as safetensors.torch.save_model has it, and safetensors.torch.load_model loads it.
torch: {step, model, optimizers, extras}, which torch.load(OUT, weights_only=True) takes; model and
  optimizers[i] go into load_state_dict. Values in extras that weights_only refuses become plain
  ones (NumPy array: tensor, deque: list), and the command says so.

Of several ranks the whole state is put together; what each rank has of its own is that of rank 0,
or of --rank.

Sharded state (FSDP2) is put together from the regions of all ranks.

OUT is written beside, synced and put in its place at once: it is never there in part."""
EXAMPLES = """\
  lightck export /dev/shm/run model.safetensors
  lightck export --step 1200 --all /dev/shm/run everything.safetensors
  lightck export --force /dev/shm/run state.pt
  python3 -c 'import torch; print(torch.load("state.pt", weights_only=True)["step"])'
"""
_SUFFIXES = {".safetensors": "safetensors", ".pt": "torch", ".pth": "torch", ".bin": "torch"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("path", metavar="PATH", help="where the snapshots are")
    parser.add_argument("out", metavar="OUT", type=Path, help="the file to write")
    add_step(parser, "the newest that is whole")
    formats = sorted(set(_SUFFIXES.values()))
    parser.add_argument("--format", choices=formats, help="default: by the suffix of OUT")
    parser.add_argument("--all", action="store_true", help="safetensors: not only the model")
    parser.add_argument(
        "--rank", type=int, default=0, metavar="R", help="of several, whose buffers and extras"
    )
    parser.add_argument("--force", action="store_true", help="replace OUT if it is there")


def run(arguments: argparse.Namespace) -> int:
    """Run the command; return the exit status."""
    out: Path = arguments.out
    kind = arguments.format or _SUFFIXES.get(out.suffix)
    if kind is None:
        known = ", ".join(_SUFFIXES)
        raise Refusal(f"{out}: the suffix says no format; use one of {known}, or --format")
    if arguments.all and kind != "safetensors":
        raise Refusal("--all is for safetensors; a torch file always holds everything")
    path = with_history(arguments.path, arguments.step)
    rows_at(path, arguments.step, whole=True)
    files = region_files(path)
    is_one = any(out.resolve() == where.file.resolve() for where in files)
    if is_one or out.suffix in (".lck", ".obj"):
        raise Refusal(f"{out} is a region, or has a region's name")
    writers: dict[str, Callable[..., tuple[int, list[str]]]]
    writers = {"safetensors": _safetensors, "torch": _torch}
    with replaced(out, force=arguments.force) as draft:
        with progress("export", 1, unit="file") as more:
            written, notes = writers[kind](arguments, draft)
            more(1)
    length = out.stat().st_size
    if arguments.json:
        document = {"file": out, "format": kind, "step": written, "bytes": length, "notes": notes}
        print_json(document)
        return OK
    print(f"{out}: step {written}, {kind}, {size(length)}")
    for note in notes:
        print(f"  {note}")
    return OK


def _safetensors(arguments: argparse.Namespace, draft: Path) -> tuple[int, list[str]]:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import save_file
    except ImportError as error:
        raise Refusal("safetensors is not installed: pip install 'lightck[cli]'") from error
    found, tensors = load_tensors(
        arguments.path, step_of(arguments), rank=arguments.rank, whole=True
    )
    first: dict[int, str] = {}
    kept: dict[str, Any] = {}
    metadata = {"format": "pt", "step": str(found), "written_by": "lightck export"}
    notes = []
    for full, tensor in tensors.items():
        if not full.startswith("model/") and not arguments.all:
            continue
        name = _flat(full)
        original = first.setdefault(id(tensor), name)
        if original != name:
            metadata[name] = original
            notes.append(f"{name} is tied to {original}; written once, noted in the metadata")
        elif name in kept:
            raise Refusal(f"two tensors would be called {name}; export without --all")
        else:
            kept[name] = tensor.contiguous()
    if tensors and not kept:
        raise Refusal(
            "it holds no model's tensors (a store has state dicts): --all takes every tensor,"
            " --format torch everything"
        )
    try:
        save_file(kept, draft, metadata=metadata)
    except (KeyError, ValueError, SafetensorError) as error:
        raise Refusal(f"safetensors cannot hold this ({error}); use --format torch") from error
    return found, notes


def _flat(full: str) -> str:
    """Return a tensor's exported name.

    Model tensors are named as in `state_dict`, others as in the region.
    """
    if not full.startswith("model/"):
        return full
    return full.removeprefix("model/").replace("%2F", "/").replace("%25", "%")


def _torch(arguments: argparse.Namespace, draft: Path) -> tuple[int, list[str]]:
    import torch

    state = load(arguments.path, step_of(arguments), rank=arguments.rank, whole=True)
    notes: list[str] = []
    document = {
        "step": state["step"],
        "model": state["model"],
        "optimizers": plain(state["optimizers"], "optimizers", notes),
        "extras": plain(state["extras"], "extras", notes),
    }
    torch.save(document, draft)
    try:
        torch.load(draft, weights_only=True, mmap=True)  # check that users can load it
    except Exception as error:  # of a module that nothing here may import
        why = re.search(r"WeightsUnpickler error: (.*)", str(error))
        if why is None:
            raise
        raise Refusal(
            f"torch's weights_only loader would not take this file ({why[1]}): an extra holds what"
            " it refuses; --format safetensors takes the tensors, lightck.load everything"
        ) from error
    return state["step"], notes


def plain(tree: Any, path: str, notes: list[str]) -> Any:
    """Convert `tree` to types that torch's weights_only loader takes; append changes to `notes`."""
    import collections

    import numpy as np
    import torch

    if isinstance(tree, np.ndarray):
        try:
            value: Any = torch.from_numpy(tree)
        except TypeError:
            value = tree.tolist()
        return _noted(value, tree, path, notes)
    if isinstance(tree, np.generic):
        return _noted(tree.item(), tree, path, notes)
    if isinstance(tree, collections.Counter | collections.defaultdict):
        inner = {k: plain(v, f"{path}/{k}", notes) for k, v in tree.items()}
        return _noted(inner, tree, path, notes)
    if isinstance(tree, dict):
        return type(tree)((k, plain(v, f"{path}/{k}", notes)) for k, v in tree.items())
    if isinstance(tree, list | tuple):
        return type(tree)(plain(v, f"{path}/{i}", notes) for i, v in enumerate(tree))
    if isinstance(tree, collections.deque | set | frozenset):
        inner_list = [plain(v, f"{path}/{i}", notes) for i, v in enumerate(tree)]
        return _noted(inner_list, tree, path, notes)
    if isinstance(tree, bytearray):
        return _noted(bytes(tree), tree, path, notes)
    return tree


def _noted(value: Any, before: Any, path: str, notes: list[str]) -> Any:
    notes.append(f"{path}: {type(before).__name__} written as {type(value).__name__}")
    return value
