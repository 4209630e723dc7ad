"""Uses of a Trainer that are specific to libraries: small modules, written from their description."""
