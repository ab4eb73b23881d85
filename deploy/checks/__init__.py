"""What can be refused or foretold before a job starts."""
