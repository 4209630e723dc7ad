"""Small parts that any package may use. They import no other package of the project."""
