package scrub

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/url"
	"strings"
	"testing"
)

// secrets are tokens of 40 characters, as GitHub's.
func secrets(n int) (v [][]byte) {
	r := rand.New(rand.NewPCG(1, 2))
	for range n {
		token := []byte("ghp_")
		for range 36 {
			token = append(token, alphabet[r.IntN(len(alphabet))])
		}
		v = append(v, token)
	}
	return v
}

const benchmarked = 1 << 20

// contents are without occurrences.
func contents() map[string][]byte {
	r := rand.New(rand.NewPCG(3, 4))
	words := strings.Fields("the quick brown fox jumps over a lazy dog while github fulfills requests for tokens and keys in lines of text that end somewhere")
	var text, object bytes.Buffer
	for i := 0; text.Len() < benchmarked; i++ {
		text.WriteString(words[r.IntN(len(words))])
		text.WriteByte(" \n"[min(i%12/11, 1)])
	}
	for i := 0; object.Len() < benchmarked; i++ {
		fmt.Fprintf(&object, `{"id":%d,"node_id":"MDEyOk%x","html_url":"https:\/\/api.example\/%s","body":"%s \"%s\"\n%s\u00e9","open":true},`,
			i, r.Uint64(), words[i%len(words)], words[r.IntN(len(words))], words[r.IntN(len(words))], words[r.IntN(len(words))])
	}
	binary := make([]byte, benchmarked)
	for i := range binary {
		binary[i] = byte(r.Uint32())
	}
	return map[string][]byte{
		"text": text.Bytes()[:benchmarked], "json": object.Bytes()[:benchmarked], "binary": binary,
		"base64":     []byte(forms64(string(binary)))[:benchmarked],
		"mime":       []byte(broken(forms64(string(binary)), 76, "\r\n"))[:benchmarked],
		"hex":        []byte(hex.EncodeToString(binary))[:benchmarked],
		"urlencoded": []byte(url.QueryEscape(string(binary)))[:benchmarked],
		"zeros":      make([]byte, benchmarked),
	}
}

func scrubAll(b *testing.B, s *Scrubber, content []byte) {
	b.SetBytes(int64(len(content)))
	b.ReportAllocs()
	p := make([]byte, 32<<10)
	for b.Loop() {
		body := s.Body(bytes.NewReader(content))
		for {
			if _, err := body.Read(p); err == io.EOF {
				break
			} else if err != nil {
				b.Fatal(err)
			}
		}
	}
}

func BenchmarkBody(b *testing.B) {
	for _, n := range []int{1, 5, 20} {
		s := New(secrets(n))
		for name, content := range contents() {
			b.Run(fmt.Sprintf("%s/%d", name, n), func(b *testing.B) { scrubAll(b, s, content) })
		}
	}
}

// BenchmarkWorst searches texts made against this very search with knowledge of the
// secrets: occurrences that break off at their last character, over and over.
func BenchmarkWorst(b *testing.B) {
	as := strings.Repeat("a", 4<<10)
	tokens := secrets(20)
	var nearly []byte
	for i := 0; len(nearly) < benchmarked; i++ {
		nearly = append(nearly, tokens[i%20][:39]...)
	}
	for name, c := range map[string]struct {
		values [][]byte
		text   string
	}{
		"tokens but one character": {tokens, string(nearly)},
		"only occurrences":         {tokens, strings.Repeat(string(bytes.Join(tokens, nil)), benchmarked/800)},
		"40 of one character":      {[][]byte{[]byte(as[:39] + "b")}, strings.Repeat("a", benchmarked)},
		"4096 of one character":    {[][]byte{[]byte(as + "b")}, strings.Repeat("a", benchmarked)},
		"255 and another":          {[][]byte{[]byte(as)}, strings.Repeat(as[:255]+"b", benchmarked/256)},
		"255 escaped":              {[][]byte{[]byte(as)}, strings.Repeat(each(as[:255], "%%%02x")+"%%%", benchmarked/768)},
		"backslashes":              {[][]byte{bytes.Repeat([]byte(`\`), 4096)}, strings.Repeat(strings.Repeat(`\`, 509)+"x", benchmarked/510)},
	} {
		b.Run(name, func(b *testing.B) { scrubAll(b, New(c.values), []byte(c.text)) })
	}
}

// BenchmarkByteByByte has a part of an occurrence held back while single bytes arrive.
func BenchmarkByteByByte(b *testing.B) {
	as := strings.Repeat("a", 4<<10)
	s := New([][]byte{[]byte(as + "b")})
	content := []byte(strings.Repeat(as[:255]+"b", 64))
	b.SetBytes(int64(len(content)))
	p := make([]byte, 32<<10)
	for b.Loop() {
		i := 0
		body := s.Body(readerFunc(func(p []byte) (int, error) {
			if i == len(content) {
				return 0, io.EOF
			}
			p[0] = content[i]
			i++
			return 1, nil
		}))
		for {
			if _, err := body.Read(p); err != nil {
				break
			}
		}
	}
}

func BenchmarkHeader(b *testing.B) {
	s := New(secrets(20))
	h := http.Header{}
	for i := range 20 {
		h.Set(fmt.Sprintf("X-Some-Header-%d", i), "some value of a usual length, such as a date or a policy")
	}
	b.ReportAllocs()
	for b.Loop() {
		s.Header(h)
	}
}

func BenchmarkNew(b *testing.B) {
	for _, n := range []int{1, 20} {
		v := secrets(n)
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				New(v)
			}
		})
	}
}

// automaton is Aho and Corasick's over the same keys: what the filter is measured
// against. It knows no escapes.
type automaton struct {
	next [][256]int32
	end  []bool
}

func newAutomaton(keys []key) *automaton {
	a := &automaton{next: make([][256]int32, 1), end: make([]bool, 1)}
	for _, k := range keys {
		n := int32(0)
		for i := range len(k.text) {
			c := k.text[i]
			if a.next[n][c] == 0 {
				a.next[n][c] = int32(len(a.next))
				a.next, a.end = append(a.next, [256]int32{}), append(a.end, false)
			}
			n = a.next[n][c]
		}
		a.end[n] = true
	}
	fail := make([]int32, len(a.next))
	queue := []int32{}
	for _, n := range a.next[0] {
		if n != 0 {
			queue = append(queue, n)
		}
	}
	for ; len(queue) > 0; queue = queue[1:] {
		n := queue[0]
		a.end[n] = a.end[n] || a.end[fail[n]]
		for c, child := range a.next[n] {
			if child == 0 {
				a.next[n][c] = a.next[fail[n]][c]
			} else {
				fail[child] = a.next[fail[n]][c]
				queue = append(queue, child)
			}
		}
	}
	return a
}

func BenchmarkAhoCorasick(b *testing.B) {
	for _, n := range []int{1, 20} {
		a := newAutomaton(New(secrets(n)).tree.keys)
		for name, content := range contents() {
			b.Run(fmt.Sprintf("%s/%d", name, n), func(b *testing.B) {
				b.SetBytes(int64(len(content)))
				for b.Loop() {
					state, found := int32(0), 0
					for _, c := range content {
						if state = a.next[state][c]; a.end[state] {
							found++
						}
					}
					if found > 0 {
						b.Fatal("found")
					}
				}
			})
		}
	}
}
