"""Features of examples from a frozen front part of a model, computed once.

If only a small head trains on top of a frozen backbone, the `Task` needs that head alone as its
model, and `Features` as its data: ``Task(model=head, data=Features(backbone, images))``. The
backbone gets one example at a time, on one thread, so that no record can change even a bit of
another record's features.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property
from logging import getLogger
from pathlib import Path
from time import monotonic

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from flower_ext.data import ClientData, Examples, trees
from flower_ext.data.trees import Tree
from flower_ext.errors import InvalidValue
from flower_ext.files import read_cached, write_cached
from flower_ext.training.isolation import isolated, seeded
from flower_ext.training.models.calls import call_with
from flower_ext.training.models.factory import digest

log = getLogger("flwr")

_SECONDS_BETWEEN_LINES = 5.0


class Features:
    """Examples of each partition, with features that a frozen front part computes.

    Targets stay unchanged. All computed features stay in memory. The data of a partition must
    not change.

    Parameters
    ----------
    front : Callable[[], nn.Module]
        Builds the frozen part, which runs in evaluation mode. It is called on one example at a
        time, with the arguments that `Examples` describes, and must return a tensor (1, …) of the
        same shape for all examples. Nodes compare only the part's parameters and buffers, so keep
        other settings, such as an image size, in a buffer.
    data : Callable[[int], ClientData]
        Returns the examples of a partition, as for `Task`. If each record has an owner, its
        features have the same owner.
    folder : Path, optional
        Folder with one file for each example's features, so that other runs and processes can read
        them. A file's name depends on the values in the example and in the front's tensors. Empty
        the folder if the front's code changes. Features in a damaged file are computed again.
    device : str
        Device of the front. With the default, features agree to the last bit on all machines of one
        kind.
    """

    def __init__(
        self,
        front: Callable[[], nn.Module],
        data: Callable[[int], ClientData],
        folder: Path | None = None,
        *,
        device: str = "cpu",
    ) -> None:
        self.front, self.data = front, data
        self.folder, self.device = folder, torch.device(device)
        self._partitions: dict[int, ClientData] = {}

    def __call__(self, partition: int) -> ClientData:
        """Return one partition's examples with features from the front.

        Raises
        ------
        ValueError
            The front does not return tensors (1, …) of one shape.
        """
        if partition not in self._partitions:
            data = self.data(partition)
            parts = (data.train, data.test)
            with isolated():  # restores the number of threads
                torch.set_num_threads(1)
                outputs = [*self._outputs(partition, parts)]
            if len({(row.shape, row.dtype) for row in outputs}) > 1:
                raise InvalidValue(
                    "front returned tensors of several shapes or types: expected the same shape "
                    "and type for all examples"
                )
            rows = torch.cat(outputs) if outputs else torch.empty(0)
            train, test = (
                Examples(features, part.targets)
                for features, part in zip(torch.split(rows, [*map(len, parts)]), parts, strict=True)
            )
            self._partitions[partition] = replace(data, train=train, test=test)
        return self._partitions[partition]

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the front's parameters and buffers, which nodes compare."""
        front = self._front
        return digest({**dict(front.named_parameters()), **dict(front.named_buffers())})[:16]

    @cached_property
    def _front(self) -> nn.Module:
        with seeded(0, torch.device("cpu")):
            return self.front().eval().requires_grad_(False).to(self.device)

    def _outputs(self, partition: int, parts: tuple[Examples, ...]) -> Iterator[Tensor]:
        logged, count, total = monotonic(), 0, sum(map(len, parts))
        for part in parts:
            for row in range(len(part)):
                # Copy the row, so that its position among other examples does not affect rounding.
                yield self._output(trees.rows(part.features, torch.tensor([row])))
                count += 1
                if monotonic() > logged + _SECONDS_BETWEEN_LINES:
                    logged = monotonic()
                    log.info("partition %d: features of %d/%d examples", partition, count, total)

    def _output(self, row: Tree) -> Tensor:
        path = None
        if self.folder is not None:
            name = digest(dict(trees.named("features", row)))
            path = self.folder / self.fingerprint / name[:2] / name[2:]
            if (content := read_cached(path)) is not None:
                return load(content)["features"]
        # Seed the generator for each example, so that no example changes another's random draws.
        with seeded(0, self.device), torch.no_grad():
            output = call_with(self._front, {}, trees.to(row, self.device))
        if not isinstance(output, Tensor) or output.shape[:1] != (1,):
            form = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise InvalidValue(f"front returned {form} for one example: expected a tensor (1, …)")
        output = output.cpu().contiguous()
        if path is not None:
            write_cached(path, save({"features": output}))
        return output
