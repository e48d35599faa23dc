package api

import (
	"bytes"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/doze-run/doze/api/types"
)

// Whatever the chunks, text stays text and no byte is lost.
func FuzzRuneJoinerKeepsEveryByteAndSplitsNoRune(f *testing.F) {
	for _, s := range []string{"", "plain", "é", "日本語", "a\xff", "\xe6\x97", "𝄞 clef", "\xf0\x9d\x84"} {
		f.Add([]byte(s), uint8(1))
		f.Add([]byte(s), uint8(3))
	}
	f.Fuzz(func(t *testing.T, data []byte, size uint8) {
		var j runeJoiner
		var got []byte
		for rest := data; len(rest) > 0; {
			n := min(int(size)+1, len(rest))
			part := j.join(rest[:n])
			if utf8.Valid(data) && !utf8.Valid(part) {
				t.Fatalf("%q was cut into %q", data, part)
			}
			got = append(got, part...)
			rest = rest[n:]
		}
		got = append(got, j.remainder()...)
		if !bytes.Equal(got, data) {
			t.Fatalf("%q became %q", data, got)
		}
	})
}

func TestCaptureDropsHalfARuneAtItsLimit(t *testing.T) {
	c := capture{limit: 4}
	c.add([]byte("abé"))
	c.add([]byte("é"))
	if text, encoding := c.text(); text != "abé" || encoding != "" || !c.truncated {
		t.Errorf("got %q, encoding %q, truncated %v", text, encoding, c.truncated)
	}
	c = capture{limit: 3}
	c.add([]byte("abé"))
	if text, encoding := c.text(); text != "ab" || encoding != "" || !c.truncated {
		t.Errorf("got %q, encoding %q, truncated %v", text, encoding, c.truncated)
	}
}

func TestEncodeMarksBytesThatAreNotText(t *testing.T) {
	if text, encoding := types.Encode([]byte{0xff, 0x00}); text != "/wA=" || encoding != "base64" {
		t.Errorf("got %q %q", text, encoding)
	}
	b, err := decode("/wA=", "base64", "body.x")
	if err != nil || !bytes.Equal(b, []byte{0xff, 0}) {
		t.Errorf("got %v, %v", b, err)
	}
}

func TestCollectedLogsJoinWhatBelongsTogether(t *testing.T) {
	c := logCollector{joiners: map[types.LogStream]*runeJoiner{"stdout": {}, "stderr": {}}, remaining: 12 + 3*chunkCost}
	say := func(stream types.LogStream, data string) { c.add(stream, c.joiners[stream].join([]byte(data))) }
	say("stdout", "a\xc3") // é in two pieces, with another stream between them
	say("stderr", "oops")
	say("stdout", "\xa9b")
	say("stdout", "c")
	say("stdout", strings.Repeat("x", 100))
	logs := c.finish()
	want := []types.LogChunk{
		{Stream: "stdout", Output: types.Output{Data: "a"}},
		{Stream: "stderr", Output: types.Output{Data: "oops"}},
		{Stream: "stdout", Output: types.Output{Data: "ébcxxx"}},
	}
	if len(logs.Logs) != len(want) || !logs.Truncated {
		t.Fatalf("got %+v", logs)
	}
	for i := range want {
		if logs.Logs[i] != want[i] {
			t.Errorf("chunk %d is %+v, not %+v", i, logs.Logs[i], want[i])
		}
	}
}

func TestCollectedLogsCountTheirChunks(t *testing.T) {
	c := logCollector{joiners: map[types.LogStream]*runeJoiner{"stdout": {}, "stderr": {}}, remaining: 10 * (chunkCost + 1)}
	for range 1000 {
		c.add("stdout", []byte("a"))
		c.add("stderr", []byte("b"))
	}
	if logs := c.finish(); len(logs.Logs) != 10 || !logs.Truncated {
		t.Errorf("%d chunks, truncated %v", len(logs.Logs), logs.Truncated)
	}
}
