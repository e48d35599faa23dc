package placeholder

import (
	"bytes"
	"io"
	"strings"
)

const (
	// pieceSize of a body that is searched in one go: the size of a TLS record.
	pieceSize = 16 << 10
	// maxEmpty reads without bytes or an error, one after the other: as bufio.
	maxEmpty = 100
)

// minHeld is the number of characters of the prefix at the end of the received bytes from
// which on they are held back. With fewer, every message of a duplex stream that ends
// with a d would wait for the next; a placeholder that was cut there is not exchanged.
const minHeld = 4

// body exchanges placeholders while it is read. It holds back only bytes that may begin a
// placeholder.
type body struct {
	x     *Exchanged
	src   io.ReadCloser
	in    func(value string) (string, error)
	fixed string // why nothing is exchanged: its length must stay
	// limited: all values of the request have at most MaxBody bytes together.
	limited bool
	err     error

	piece      []byte
	unsearched []byte // of piece: arrived, not searched
	out        []byte // to go out
}

func (b *body) Close() error { return b.src.Close() }

func (b *body) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	for empty := 0; len(b.out) == 0; {
		if b.next() {
			continue
		}
		if b.err != nil {
			return 0, b.err
		}
		if b.piece == nil {
			b.piece = make([]byte, pieceSize)
		}
		kept := copy(b.piece, b.unsearched) // shorter than a placeholder
		n, err := b.src.Read(b.piece[kept:])
		b.unsearched = b.piece[:kept+n]
		if b.err = err; n > 0 || err != nil {
			empty = 0
		} else if empty++; empty == maxEmpty {
			return 0, io.ErrNoProgress
		}
	}
	n := copy(p, b.out)
	b.out = b.out[n:]
	return n, nil
}

// next moves the bytes before a placeholder, or its value, to out, and reports whether
// there were any.
func (b *body) next() bool {
	i := bytes.Index(b.unsearched, []byte(Prefix))
	switch {
	case i < 0:
		return b.pass(len(b.unsearched) - b.partial())
	case i > 0:
		return b.pass(i)
	}
	offer, part := b.x.set.find(string(b.unsearched[:min(len(b.unsearched), b.x.set.longest)]))
	switch {
	case offer == nil && part && b.err == nil:
		return false
	case offer == nil:
		return b.pass(len(Prefix))
	case b.fixed != "":
		return b.refuse(&RefusedError{offer.Secret, b.fixed})
	}
	value, err := b.x.valueOf(offer, b.in)
	if err != nil {
		return b.refuse(err)
	}
	if b.x.placed += len(value); b.limited && b.x.placed > MaxBody { // placeholders are short, values may be long
		return b.refuse(&RefusedError{offer.Secret, "the request would become too long"})
	}
	b.out, b.unsearched = []byte(value), b.unsearched[len(offer.Text):]
	return true
}

func (b *body) pass(n int) bool {
	b.out, b.unsearched = b.unsearched[:n], b.unsearched[n:]
	return n > 0
}

// partial returns the number of bytes at the end of unsearched that may begin a prefix.
func (b *body) partial() int {
	if b.err != nil {
		return 0
	}
	for n := min(len(Prefix)-1, len(b.unsearched)); n >= minHeld; n-- {
		if strings.HasPrefix(Prefix, string(b.unsearched[len(b.unsearched)-n:])) {
			return n
		}
	}
	return 0
}

func (b *body) refuse(err error) bool {
	b.x.mu.Lock()
	defer b.x.mu.Unlock()
	b.x.refused = err
	b.err, b.unsearched = err, nil
	return false
}
