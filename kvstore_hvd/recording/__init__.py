"""The timeline of a job: what each worker writes while it runs, and the one file that is made of it."""
