"""CIFAR-10, downloaded by torchvision."""

from pathlib import Path

from torch.utils.data import Subset
from torchvision import datasets
from torchvision.transforms import v2

from recipes.data.loading import SplitDataModule, check_num_classes, image_to_tensor, stratified_split

# Per channel, of the training images in [0, 1].
MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)


class CIFAR10(SplitDataModule):
    """60,000 colour images of 3x32x32: 45,000 to train on, 5,000 to validate, 10,000 to test.

    The validation images are held out of the 50,000 training images. Those trained on are shifted by up to
    four pixels and mirrored.

    Args:
        root: folder of the data; 170 MB are downloaded into it when it does not hold them yet.
        batch_size: images in a batch, on one rank.
        num_workers: processes that prepare batches; 0 prepares them in the training process.
        augment: shift and mirror the training images.
        split_seed: of the validation split, which is stratified and depends on nothing else.
        num_classes: of the model; must be 10.

    Raises:
        ValueError: ``num_classes`` is not 10.
    """

    def __init__(
        self,
        root: str | Path = "data",
        batch_size: int = 128,
        *,
        num_workers: int = 2,
        augment: bool = True,
        split_seed: int = 0,
        num_classes: int = 10,
    ) -> None:
        super().__init__(batch_size, num_workers)
        check_num_classes(num_classes, 10, "CIFAR-10")
        self.root = Path(root).expanduser()
        self.augment = augment
        self.split_seed = split_seed

    def prepare_data(self) -> None:
        """Download the data unless it is there.

        Raises:
            FileNotFoundError: it is neither there nor to be had; says what was tried and where to put it.
        """
        try:
            datasets.CIFAR10(self.root, download=True)
        except (OSError, RuntimeError) as error:  # no network, a proxy's page for an archive, no permission
            archive = self.root.resolve() / datasets.CIFAR10.filename
            raise FileNotFoundError(
                f"CIFAR-10 is not in {self.root.resolve()} and could not be downloaded from "
                f"{datasets.CIFAR10.url} ({type(error).__name__}: {error}). "
                f"Without a network, fetch that file elsewhere and save it as {archive} "
                f"(MD5 {datasets.CIFAR10.tgz_md5}); it is unpacked on the next run. "
                "Or set data.root to a folder that has it, or take data=digits, which needs no download."
            ) from error

    def setup(self, stage: str) -> None:
        """Read and split the data; a second stage finds it done."""
        if self.splits:
            return
        evaluation = image_to_tensor(MEAN, STD)
        training = evaluation
        if self.augment:
            training = v2.Compose([v2.RandomCrop(32, padding=4), v2.RandomHorizontalFlip(), evaluation])
        augmented = datasets.CIFAR10(self.root, transform=training)
        plain = datasets.CIFAR10(self.root, transform=evaluation)
        train, val = stratified_split(plain.targets, held_out=[len(plain) // 10], seed=self.split_seed)
        self.splits = {
            "train": Subset(augmented, train),
            "val": Subset(plain, val),
            "test": datasets.CIFAR10(self.root, train=False, transform=evaluation),
        }
