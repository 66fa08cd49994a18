"""What several test files share."""

from __future__ import annotations

from pathlib import Path

import hypothesis
import pytest

# A machine under load must not fail a property test.
hypothesis.settings.register_profile(
    "mrgym", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("mrgym")

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    """Data that is not part of the project; tests that need it are skipped where it is absent."""
    if not SHARED.is_dir():
        pytest.skip(f"no data: the folder {SHARED} (beside the checkout) is absent")
    return SHARED
