package stack

// Take takes room for a connection that is in no stack, and says whether there is
// any. Who took it gives it back.
func (b *Budget) Take() bool { return b.takeConnection() }

// Give gives back what Take took.
func (b *Budget) Give() { b.give(false) }
