"""Version 1: turns and files."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "turns",
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("id", sa.String(64), nullable=False, unique=True),
        sa.Column("owner", sa.String(128), nullable=False),
        sa.Column("parent_id", sa.String(64)),
        sa.Column("hidden", sa.Boolean, nullable=False, default=False),
        sa.Column("expires_at", sa.Float(53), nullable=False),
        sa.Column("question", sa.Text, nullable=False),
        sa.Column("answer", sa.Text),
    )
    op.create_table(
        "files",
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("id", sa.String(64), nullable=False, unique=True),
        sa.Column("owner", sa.String(128), nullable=False),
        sa.Column("expires_at", sa.Float(53), nullable=False),
        sa.Column("body", sa.Text, nullable=False),
    )
