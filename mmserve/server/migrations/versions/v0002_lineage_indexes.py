"""Version 2: removal looks for hidden turns and for the children of one."""

from __future__ import annotations

from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.create_index("turns_parent_id", "turns", ["parent_id"])
    op.create_index("turns_hidden", "turns", ["hidden"])
