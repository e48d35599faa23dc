package clienthello_test

import (
	"bytes"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"slices"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/doze-run/doze/egress/tls/clienthello"
	"github.com/doze-run/doze/egress/tls/clienthello/hellotest"
)

// helloOf returns the ClientHello of a client with this configuration.
func helloOf(t testing.TB, cfg *tls.Config) []byte {
	t.Helper()
	c := &recordingConn{}
	if err := tls.Client(c, cfg).Handshake(); !errors.Is(err, io.EOF) {
		t.Fatal(err)
	}
	return c.sent
}

type recordingConn struct {
	net.Conn
	sent []byte
}

func (e *recordingConn) Write(b []byte) (int, error) {
	e.sent = append(e.sent, b...)
	return len(b), nil
}
func (e *recordingConn) Read([]byte) (int, error)         { return 0, io.EOF }
func (e *recordingConn) Close() error                     { return nil }
func (e *recordingConn) SetWriteDeadline(time.Time) error { return nil }

// echConfigs returns configurations that hide a name behind a public one.
func echConfigs(t testing.TB, public string) []byte {
	t.Helper()
	list, err := hellotest.ECHConfigs(public)
	if err != nil {
		t.Fatal(err)
	}
	return list
}

func TestHelloOfRealClients(t *testing.T) {
	for name, c := range map[string]struct {
		cfg  *tls.Config
		want clienthello.Hello
	}{
		"name":           {&tls.Config{ServerName: "api.github.com"}, clienthello.Hello{ServerName: "api.github.com"}},
		"as it was sent": {&tls.Config{ServerName: "API.GitHub.com"}, clienthello.Hello{ServerName: "API.GitHub.com"}},
		"protocols":      {&tls.Config{ServerName: "a.example", NextProtos: []string{"h2", "http/1.1"}}, clienthello.Hello{ServerName: "a.example"}},
		"address":        {&tls.Config{ServerName: "192.0.2.1"}, clienthello.Hello{}},
		"old":            {&tls.Config{ServerName: "a.example", MinVersion: tls.VersionTLS10, MaxVersion: tls.VersionTLS10}, clienthello.Hello{ServerName: "a.example"}},
		"large":          {&tls.Config{ServerName: "a.example", NextProtos: slices.Repeat([]string{strings.Repeat("x", 200)}, 100)}, clienthello.Hello{ServerName: "a.example"}},
		"encrypted":      {&tls.Config{ServerName: "inner.example", MinVersion: tls.VersionTLS13, EncryptedClientHelloConfigList: echConfigs(t, "outer.example")}, clienthello.Hello{ServerName: "outer.example", ECH: true}},
	} {
		t.Run(name, func(t *testing.T) {
			c.cfg.InsecureSkipVerify = true
			sent := helloOf(t, c.cfg)
			for how, r := range map[string]io.Reader{
				"in one read": bytes.NewReader(sent), "byte by byte": iotest.OneByteReader(bytes.NewReader(sent)),
				"with more": io.MultiReader(bytes.NewReader(sent), strings.NewReader("early data")),
			} {
				got, received, err := clienthello.Read(r)
				if err != nil || got != c.want {
					t.Errorf("%s: got %+v, %v; want %+v", how, got, err, c.want)
				}
				if !bytes.HasPrefix(received, sent) {
					t.Errorf("%s: of %d bytes %d were returned", how, len(sent), len(received))
				}
			}
		})
	}
}

// A hello may be split into records anywhere, which hides the name from filters that
// search only the first packet.
func TestHelloInManyRecords(t *testing.T) {
	sent := helloOf(t, &tls.Config{ServerName: "api.github.com"})
	head, message := sent[:3], sent[5:]
	var split []byte
	for part := range slices.Chunk(message, 16) {
		split = append(append(split, head...), 0, byte(len(part)))
		split = append(split, part...)
	}
	got, received, err := clienthello.Read(bytes.NewReader(split))
	if err != nil || got.ServerName != "api.github.com" || !bytes.Equal(received, split) {
		t.Errorf("got %+v, %v", got, err)
	}
}

func TestInvalidHellos(t *testing.T) {
	sent := helloOf(t, &tls.Config{ServerName: "a.example"})
	endless := func() io.Reader { // a message whose records never end
		record := append([]byte{22, 3, 1, 0x10, 0}, make([]byte, 0x1000)...)
		copy(record[5:], []byte{1, 0, 0xff, 0xff})
		return bytes.NewReader(slices.Repeat(record, 64))
	}
	broken := errors.New("broken")
	for name, c := range map[string]struct {
		r    io.Reader
		want error // nil: any
	}{
		"nothing":         {strings.NewReader(""), io.EOF},
		"HTTP":            {strings.NewReader("GET / HTTP/1.1\r\n\r\n"), clienthello.ErrNotTLS},
		"SSH":             {strings.NewReader("SSH-2.0-OpenSSH\r\n"), clienthello.ErrNotTLS},
		"cut":             {bytes.NewReader(sent[:len(sent)-1]), io.EOF},
		"cut in a header": {bytes.NewReader(sent[:3]), io.EOF},
		"read error":      {io.MultiReader(bytes.NewReader(sent[:20]), iotest.ErrReader(broken)), broken},
		"garbage":         {strings.NewReader("\x16\x03\x01\x00\x05aaaaaaaa"), nil},
		"another message": {strings.NewReader("\x16\x03\x01\x00\x04\x02\x00\x00\x00"), nil},
		"endless":         {endless(), nil},
		"trailing dot":    {bytes.NewReader(bytes.Replace(sent, []byte("a.example"), []byte("a.exampl."), 1)), nil},
		"endless records": {bytes.NewReader(append(slices.Repeat([]byte{22, 3, 1, 0, 1, 1}, 1), slices.Repeat([]byte{22, 3, 1, 0, 1, 0xff}, clienthello.MaxBytes)...)), nil},
	} {
		t.Run(name, func(t *testing.T) {
			got, received, err := clienthello.Read(c.r)
			if err == nil || c.want != nil && !errors.Is(err, c.want) {
				t.Errorf("got %+v, error %v", got, err)
			}
			if len(received) > clienthello.MaxBytes {
				t.Errorf("%d bytes were read", len(received))
			}
		})
	}
}

// FuzzRead checks that the hello does not depend on the boundaries of reads, that Read
// returns all bytes that it has read, and that the parsed hello agrees with parseHello.
func FuzzRead(f *testing.F) {
	f.Add(helloOf(f, &tls.Config{ServerName: "api.github.com", NextProtos: []string{"h2"}}))
	f.Add(helloOf(f, &tls.Config{ServerName: "inner.example", MinVersion: tls.VersionTLS13, EncryptedClientHelloConfigList: echConfigs(f, "outer.example")}))
	f.Add(helloOf(f, &tls.Config{ServerName: "old.example", MinVersion: tls.VersionTLS10, MaxVersion: tls.VersionTLS10}))
	f.Add([]byte("\x16\x03\x01\x00\x05aaaaa"))
	f.Fuzz(func(t *testing.T, b []byte) {
		one, received, err := clienthello.Read(bytes.NewReader(b))
		if !bytes.HasPrefix(b, received) || len(received) > clienthello.MaxBytes {
			t.Fatalf("received %d bytes of %d, want a prefix", len(received), len(b))
		}
		other, _, otherErr := clienthello.Read(iotest.OneByteReader(bytes.NewReader(b)))
		if (err == nil) != (otherErr == nil) || one.ServerName != other.ServerName || one.ECH != other.ECH {
			t.Errorf("in one read %+v, %v; byte by byte %+v, %v", one, err, other, otherErr)
		}
		if err != nil {
			return
		}
		if name, ech, ok := parseHello(b); !ok || one.ServerName != name || one.ECH != ech {
			t.Errorf("%+v, want %q, ECH %v, %v", one, name, ech, ok)
		}
	})
}

// parseHello parses the server name and Encrypted Client Hello of a hello by RFC 8446 and
// 6066. It implements no other part of TLS.
func parseHello(b []byte) (name string, ech, ok bool) {
	message := &fields{ok: true}
	for in := (&fields{b, true}); ; { // one record at a time
		kind := in.next(1)
		in.next(2)
		part := in.vector(2)
		if !in.ok || kind[0] != 22 {
			break
		}
		message.data = append(message.data, part.data...)
	}
	isHello := message.next(1)[0] == 1
	hello := message.vector(3)
	hello.next(2 + 32) // version, random
	hello.vector(1)    // session
	hello.vector(2)    // suites
	hello.vector(1)    // compressions
	if len(hello.data) == 0 {
		return "", false, isHello && hello.ok
	}
	extensions := hello.vector(2)
	for extensions.ok && len(extensions.data) > 0 {
		kind := binary.BigEndian.Uint16(extensions.next(2))
		data := extensions.vector(2)
		switch kind {
		case 0xfe0d:
			ech = true
		case 0:
			for names := data.vector(2); names.ok && len(names.data) > 0; {
				isHost := names.next(1)[0] == 0
				if text := names.vector(2); isHost {
					name = string(text.data)
				}
			}
		}
	}
	return name, ech, isHello && hello.ok && extensions.ok
}

// fields are parsed one after another, until one is missing.
type fields struct {
	data []byte
	ok   bool
}

func (f *fields) next(n int) []byte {
	if !f.ok || n > len(f.data) {
		f.ok = false
		return make([]byte, min(n, 34))
	}
	received := f.data[:n]
	f.data = f.data[n:]
	return received
}

// vector reads a length, encoded in the given number of bytes, and as many bytes of data.
func (f *fields) vector(bytes int) *fields {
	n := 0
	for _, b := range f.next(bytes) {
		n = n<<8 | int(b)
	}
	received := f.next(n)
	return &fields{received, f.ok}
}

func BenchmarkRead(b *testing.B) {
	sent := helloOf(b, &tls.Config{ServerName: "api.github.com", NextProtos: []string{"h2", "http/1.1"}})
	b.ReportAllocs()
	for b.Loop() {
		if _, _, err := clienthello.Read(bytes.NewReader(sent)); err != nil {
			b.Fatal(err)
		}
	}
}
