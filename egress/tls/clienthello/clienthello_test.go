package clienthello

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

	"github.com/doze-run/doze/egress/tls/clienthello/hellotest"
)

// say returns the ClientHello of a client with this configuration.
func say(t testing.TB, cfg *tls.Config) []byte {
	t.Helper()
	c := &ear{}
	if err := tls.Client(c, cfg).Handshake(); !errors.Is(err, io.EOF) {
		t.Fatal(err)
	}
	return c.said
}

type ear struct {
	net.Conn
	said []byte
}

func (e *ear) Write(b []byte) (int, error)      { e.said = append(e.said, b...); return len(b), nil }
func (e *ear) Read([]byte) (int, error)         { return 0, io.EOF }
func (e *ear) Close() error                     { return nil }
func (e *ear) SetWriteDeadline(time.Time) error { return nil }

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
		want Hello
	}{
		"name":           {&tls.Config{ServerName: "api.github.com"}, Hello{ServerName: "api.github.com"}},
		"as it was sent": {&tls.Config{ServerName: "API.GitHub.com"}, Hello{ServerName: "API.GitHub.com"}},
		"protocols":      {&tls.Config{ServerName: "a.example", NextProtos: []string{"h2", "http/1.1"}}, Hello{ServerName: "a.example", ALPN: []string{"h2", "http/1.1"}}},
		"address":        {&tls.Config{ServerName: "192.0.2.1"}, Hello{}},
		"old":            {&tls.Config{ServerName: "a.example", MinVersion: tls.VersionTLS10, MaxVersion: tls.VersionTLS10}, Hello{ServerName: "a.example"}},
		"large":          {&tls.Config{ServerName: "a.example", NextProtos: slices.Repeat([]string{strings.Repeat("x", 200)}, 100)}, Hello{ServerName: "a.example", ALPN: slices.Repeat([]string{strings.Repeat("x", 200)}, 100)}},
		"encrypted":      {&tls.Config{ServerName: "inner.example", MinVersion: tls.VersionTLS13, EncryptedClientHelloConfigList: echConfigs(t, "outer.example")}, Hello{ServerName: "outer.example", ECH: true}},
	} {
		t.Run(name, func(t *testing.T) {
			c.cfg.InsecureSkipVerify = true
			said := say(t, c.cfg)
			for how, r := range map[string]io.Reader{
				"at once": bytes.NewReader(said), "byte by byte": iotest.OneByteReader(bytes.NewReader(said)),
				"with more": io.MultiReader(bytes.NewReader(said), strings.NewReader("early data")),
			} {
				got, taken, err := Read(r)
				if err != nil || got.ServerName != c.want.ServerName || got.ECH != c.want.ECH || !slices.Equal(got.ALPN, c.want.ALPN) {
					t.Errorf("%s: got %+v, %v; want %+v", how, got, err, c.want)
				}
				if !bytes.HasPrefix(taken, said) {
					t.Errorf("%s: of %d bytes %d were given back", how, len(said), len(taken))
				}
			}
		})
	}
}

// A hello may be split into records anywhere, which hides the name from filters that
// search only the first packet.
func TestHelloInManyRecords(t *testing.T) {
	said := say(t, &tls.Config{ServerName: "api.github.com"})
	head, message := said[:3], said[5:]
	var split []byte
	for part := range slices.Chunk(message, 16) {
		split = append(append(split, head...), 0, byte(len(part)))
		split = append(split, part...)
	}
	got, taken, err := Read(bytes.NewReader(split))
	if err != nil || got.ServerName != "api.github.com" || !bytes.Equal(taken, split) {
		t.Errorf("got %+v, %v", got, err)
	}
}

func TestWhatIsNoHello(t *testing.T) {
	said := say(t, &tls.Config{ServerName: "a.example"})
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
		"HTTP":            {strings.NewReader("GET / HTTP/1.1\r\n\r\n"), ErrNotTLS},
		"SSH":             {strings.NewReader("SSH-2.0-OpenSSH\r\n"), ErrNotTLS},
		"cut":             {bytes.NewReader(said[:len(said)-1]), io.EOF},
		"cut in a header": {bytes.NewReader(said[:3]), io.EOF},
		"read error":      {io.MultiReader(bytes.NewReader(said[:20]), iotest.ErrReader(broken)), broken},
		"garbage":         {strings.NewReader("\x16\x03\x01\x00\x05aaaaaaaa"), nil},
		"another message": {strings.NewReader("\x16\x03\x01\x00\x04\x02\x00\x00\x00"), nil},
		"endless":         {endless(), nil},
		"trailing dot":    {bytes.NewReader(bytes.Replace(said, []byte("a.example"), []byte("a.exampl."), 1)), nil},
		"endless records": {bytes.NewReader(append(slices.Repeat([]byte{22, 3, 1, 0, 1, 1}, 1), slices.Repeat([]byte{22, 3, 1, 0, 1, 0xff}, MaxBytes)...)), nil},
	} {
		t.Run(name, func(t *testing.T) {
			got, taken, err := Read(c.r)
			if err == nil || c.want != nil && !errors.Is(err, c.want) {
				t.Errorf("got %+v, error %v", got, err)
			}
			if len(taken) > MaxBytes {
				t.Errorf("%d bytes were read", len(taken))
			}
		})
	}
}

// FuzzRead checks that the hello does not depend on the boundaries of reads, that Read
// returns all bytes that it has read, and that the parsed hello agrees with plainly.
func FuzzRead(f *testing.F) {
	f.Add(say(f, &tls.Config{ServerName: "api.github.com", NextProtos: []string{"h2"}}))
	f.Add(say(f, &tls.Config{ServerName: "inner.example", MinVersion: tls.VersionTLS13, EncryptedClientHelloConfigList: echConfigs(f, "outer.example")}))
	f.Add(say(f, &tls.Config{ServerName: "old.example", MinVersion: tls.VersionTLS10, MaxVersion: tls.VersionTLS10}))
	f.Add([]byte("\x16\x03\x01\x00\x05aaaaa"))
	f.Fuzz(func(t *testing.T, b []byte) {
		one, taken, err := Read(bytes.NewReader(b))
		if !bytes.HasPrefix(b, taken) || len(taken) > MaxBytes {
			t.Fatalf("took %d bytes of %d, others than were sent", len(taken), len(b))
		}
		other, _, otherErr := Read(iotest.OneByteReader(bytes.NewReader(b)))
		if (err == nil) != (otherErr == nil) || one.ServerName != other.ServerName || one.ECH != other.ECH {
			t.Errorf("at once %+v, %v; byte by byte %+v, %v", one, err, other, otherErr)
		}
		if err != nil {
			return
		}
		if name, ech, ok := plainly(b); !ok || one.ServerName != name || one.ECH != ech {
			t.Errorf("%+v, where it says %q, ECH %v, %v", one, name, ech, ok)
		}
	})
}

// plainly parses the server name and Encrypted Client Hello of a hello by RFC 8446 and
// 6066. It implements no other part of TLS.
func plainly(b []byte) (name string, ech, ok bool) {
	message := &fields{ok: true}
	for in := (&fields{b, true}); ; { // one record at a time
		kind := in.take(1)
		in.take(2)
		part := in.vector(2)
		if !in.ok || kind[0] != 22 {
			break
		}
		message.rest = append(message.rest, part.rest...)
	}
	isHello := message.take(1)[0] == 1
	hello := message.vector(3)
	hello.take(2 + 32) // version, random
	hello.vector(1)    // session
	hello.vector(2)    // suites
	hello.vector(1)    // compressions
	if len(hello.rest) == 0 {
		return "", false, isHello && hello.ok
	}
	extensions := hello.vector(2)
	for extensions.ok && len(extensions.rest) > 0 {
		kind := binary.BigEndian.Uint16(extensions.take(2))
		data := extensions.vector(2)
		switch kind {
		case 0xfe0d:
			ech = true
		case 0:
			for names := data.vector(2); names.ok && len(names.rest) > 0; {
				isHost := names.take(1)[0] == 0
				if text := names.vector(2); isHost {
					name = string(text.rest)
				}
			}
		}
	}
	return name, ech, isHello && hello.ok && extensions.ok
}

// fields are parsed one after another, until one is missing.
type fields struct {
	rest []byte
	ok   bool
}

func (f *fields) take(n int) []byte {
	if !f.ok || n > len(f.rest) {
		f.ok = false
		return make([]byte, min(n, 34))
	}
	taken := f.rest[:n]
	f.rest = f.rest[n:]
	return taken
}

// vector reads a length, encoded in the given number of bytes, and as many bytes of data.
func (f *fields) vector(bytes int) *fields {
	n := 0
	for _, b := range f.take(bytes) {
		n = n<<8 | int(b)
	}
	taken := f.take(n)
	return &fields{taken, f.ok}
}

func BenchmarkRead(b *testing.B) {
	said := say(b, &tls.Config{ServerName: "api.github.com", NextProtos: []string{"h2", "http/1.1"}})
	b.ReportAllocs()
	for b.Loop() {
		if _, _, err := Read(bytes.NewReader(said)); err != nil {
			b.Fatal(err)
		}
	}
}
