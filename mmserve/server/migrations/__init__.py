"""The database's schema as a chain of steps, which alembic runs; `versions` holds them."""
