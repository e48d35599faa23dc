// Package clienthello reads the first message of a TLS connection, before the
// connection is passed through or intercepted.
package clienthello

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"time"
)

// MaxBytes is how much is read at most, records and all. Hellos have some 300
// to 2,000 bytes; with post-quantum keys and a session ticket some 4,000.
const MaxBytes = 32 << 10

var (
	// ErrNotTLS: the first byte is none of a TLS handshake.
	ErrNotTLS = errors.New("not the start of a TLS connection")
	// ErrTooLong: no whole ClientHello within MaxBytes.
	ErrTooLong = fmt.Errorf("a ClientHello of more than %d bytes", MaxBytes)
)

// Hello is what a ClientHello says.
type Hello struct {
	// ServerName is the SNI (RFC 6066) as it was sent: not lower-cased, perhaps
	// no name at all, empty without one. A name that ends in a dot is an error.
	ServerName string
	ALPN       []string // protocols offered, the client's favourite first
	// ECH is set when the hello has the extension of Encrypted Client Hello
	// (RFC 9849). The real name may then be another one. A client without a
	// key for the host sends the extension too, with noise in it (GREASE).
	ECH bool
}

const (
	recordHandshake = 22     // RFC 8446, section 5.1
	extensionECH    = 0xfe0d // RFC 9849, section 11.1
)

// IsTLS says whether a connection that starts with this byte speaks TLS.
func IsTLS(first byte) bool { return first == recordHandshake }

// Read reads a ClientHello from r. The bytes that it took from r are returned
// in any case, so that they can be passed on. An error that is neither
// ErrNotTLS nor ErrTooLong is r's own, or says what is wrong with the hello.
func Read(r io.Reader) (Hello, []byte, error) {
	t := &tap{r: r}
	var first [1]byte
	if _, err := io.ReadFull(t, first[:]); err != nil {
		return Hello{}, t.taken, err
	}
	if !IsTLS(first[0]) {
		return Hello{}, t.taken, ErrNotTLS
	}
	t.again = t.taken

	var hello *Hello
	// The library's own server parses; it is stopped before it answers.
	err := tls.Server(t, &tls.Config{
		GetConfigForClient: func(info *tls.ClientHelloInfo) (*tls.Config, error) {
			hello = &Hello{
				ServerName: info.ServerName,
				ALPN:       info.SupportedProtos,
				ECH:        slices.Contains(info.Extensions, extensionECH),
			}
			return nil, errStop
		},
	}).HandshakeContext(context.Background())
	switch {
	case hello != nil:
		return *hello, t.taken, nil
	case t.err != nil:
		return Hello{}, t.taken, t.err
	}
	return Hello{}, t.taken, fmt.Errorf("reading a ClientHello: %w", err)
}

var errStop = errors.New("the hello was read")

// tap is a connection that can only be read, and keeps what was.
type tap struct {
	r     io.Reader
	again []byte // to be read once more
	taken []byte
	err   error // of r, or ErrTooLong
}

func (t *tap) Read(b []byte) (int, error) {
	if len(t.again) > 0 {
		n := copy(b, t.again)
		t.again = t.again[n:]
		return n, nil
	}
	if len(t.taken) == MaxBytes {
		t.err = ErrTooLong
		return 0, t.err
	}
	n, err := t.r.Read(b[:min(len(b), MaxBytes-len(t.taken))])
	t.taken = append(t.taken, b[:n]...)
	if err != nil && t.err == nil {
		t.err = err
	}
	return n, err
}

// The server says goodbye when it is stopped: to nobody.
func (t *tap) Write(b []byte) (int, error) { return len(b), nil }

func (t *tap) Close() error                     { return nil }
func (t *tap) LocalAddr() net.Addr              { return nil }
func (t *tap) RemoteAddr() net.Addr             { return nil }
func (t *tap) SetDeadline(time.Time) error      { return nil }
func (t *tap) SetReadDeadline(time.Time) error  { return nil }
func (t *tap) SetWriteDeadline(time.Time) error { return nil }

var _ net.Conn = (*tap)(nil)
