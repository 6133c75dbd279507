"""What several families share: fields, rotary positions, decoder and expert rules, shapes."""
