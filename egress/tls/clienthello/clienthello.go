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
)

// MaxBytes is the limit of bytes that Read reads, including record headers. A
// ClientHello has some 300 to 2,000 bytes; with post-quantum keys and a session
// ticket some 4,000.
const MaxBytes = 32 << 10

var (
	// ErrNotTLS means that the first byte does not start a TLS handshake record.
	ErrNotTLS = errors.New("not the start of a TLS connection")
	// ErrTooLong means that the first MaxBytes bytes do not contain a whole ClientHello.
	ErrTooLong = fmt.Errorf("a ClientHello of more than %d bytes", MaxBytes)
)

// Hello is the content of a ClientHello.
type Hello struct {
	// ServerName is the SNI (RFC 6066) as it was sent: not lower-cased, possibly
	// not a valid name, empty without SNI. A name that ends in a dot is an error.
	ServerName string
	// ECH is set when the hello has the extension of Encrypted Client Hello (RFC
	// 9849). The real server name may then differ from ServerName. A client without
	// a key for the host sends the extension too, with random content (GREASE).
	ECH bool
}

const (
	recordHandshake = 22     // RFC 8446, section 5.1
	extensionECH    = 0xfe0d // RFC 9849, section 11.1
)

// IsTLS reports whether a connection that starts with this byte speaks TLS.
func IsTLS(first byte) bool { return first == recordHandshake }

// Read reads a ClientHello from r. It returns the bytes that it has read from r
// in any case, so that they can be forwarded. An error other than ErrNotTLS and
// ErrTooLong is r's own, or describes an invalid hello.
func Read(r io.Reader) (Hello, []byte, error) {
	t := &tap{r: r}
	var first [1]byte
	if _, err := io.ReadFull(t, first[:]); err != nil {
		return Hello{}, t.received, err
	}
	if !IsTLS(first[0]) {
		return Hello{}, t.received, ErrNotTLS
	}
	t.again = t.received

	var hello *Hello
	// The TLS server of crypto/tls parses; it is stopped before it responds.
	err := tls.Server(t, &tls.Config{
		GetConfigForClient: func(info *tls.ClientHelloInfo) (*tls.Config, error) {
			hello = &Hello{
				ServerName: info.ServerName,
				ECH:        slices.Contains(info.Extensions, extensionECH),
			}
			return nil, errStop
		},
	}).HandshakeContext(context.Background())
	switch {
	case hello != nil:
		return *hello, t.received, nil
	case t.err != nil:
		return Hello{}, t.received, t.err
	}
	return Hello{}, t.received, fmt.Errorf("read a ClientHello: %w", err)
}

var errStop = errors.New("the hello was read")

// tap is a read-only connection that records the bytes read from r. The TLS server calls
// only Read and Write.
type tap struct {
	net.Conn

	r        io.Reader
	again    []byte // to be read again
	received []byte
	err      error // r's, or ErrTooLong
}

func (t *tap) Read(b []byte) (int, error) {
	if len(t.again) > 0 {
		n := copy(b, t.again)
		t.again = t.again[n:]
		return n, nil
	}
	if len(t.received) == MaxBytes {
		t.err = ErrTooLong
		return 0, t.err
	}
	n, err := t.r.Read(b[:min(len(b), MaxBytes-len(t.received))])
	t.received = append(t.received, b[:n]...)
	if err != nil && t.err == nil {
		t.err = err
	}
	return n, err
}

// Write discards the alert that the server sends when it is stopped.
func (t *tap) Write(b []byte) (int, error) { return len(b), nil }
