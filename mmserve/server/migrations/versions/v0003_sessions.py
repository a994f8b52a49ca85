"""Version 3: what a conversation keeps and what it dropped; null in a turn of an older server."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.add_column("turns", sa.Column("session", sa.Text))
