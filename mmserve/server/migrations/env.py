"""What alembic runs to take a database to another version: on the connection it is handed, in the
transaction that is open there, so that a step is done wholly or not at all."""

from __future__ import annotations

from alembic import context

context.configure(connection=context.config.attributes["connection"])
context.run_migrations()
