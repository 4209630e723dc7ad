"""What libraries do with a Trainer and other programs do not: small modules, written from their description."""
