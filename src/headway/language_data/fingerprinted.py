"""`FingerprintedDataset`: base of datasets whose saved state only shows whether their samples have changed."""

from typing import Any, ClassVar, TypeVar

from torch.utils.data import Dataset

from headway.errors import DataError

Sample = TypeVar("Sample", covariant=True)


class FingerprintedDataset(Dataset[Sample]):
    """Map-style dataset whose state is a hash of its data and its order. The position is saved by the loader.

    A resumed run can therefore refuse a position that would refer to a different sample.

    Attributes:
        fingerprinted_settings: Data and arguments that determine the samples, as the subject of an error message.
    """

    fingerprinted_settings: ClassVar[str]

    @property
    def source_fingerprint(self) -> str:
        """Hash of the data and of the settings that determine the samples. Ranks compare it before they train."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Return {"source": fingerprint of the data and its order}. The position is saved by the loader."""
        return {"source": self.source_fingerprint}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Check that data and settings are those of the dataset that saved `state`. Nothing is loaded.

        Raises:
            DataError: If the data or the settings differ, so that a position would refer to a different sample.
        """
        if state["source"] != self.source_fingerprint:
            raise DataError(
                f"{self.fingerprinted_settings} have changed since the state was saved, so its position would lose some samples and "
                "repeat others. Restore them, or begin another epoch"
            )
