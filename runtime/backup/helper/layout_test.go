package helper

import (
	"encoding/json"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/backup/wire"
	"github.com/doze-run/doze/runtime/disk/tree"
	"github.com/doze-run/doze/testkit"
)

func TestNamesAreEncodedAsUTF8(t *testing.T) {
	for _, c := range []struct{ name, encoded string }{
		{"a", "a"},
		{"…\n\"\\ ", "…\n\"\\ "},
		{"...", "..."},
		{"\xff", "doze-encoded-ff"},
		{"a\xc3", "doze-encoded-61c3"},
		{"doze-encoded-61", "doze-encoded-646f7a652d656e636f6465642d3631"}, // also what looks like an encoded name
		{"doze-encoded-", "doze-encoded-646f7a652d656e636f6465642d"},
	} {
		if got := encodeName(c.name); got != c.encoded {
			t.Errorf("%q is encoded as %q, want %q", c.name, got, c.encoded)
		}
	}
	var names []string
	for b := 1; b < 256; b++ {
		names = append(names, string([]byte{byte(b), 'x'}), string([]byte{'x', byte(b)}), string([]byte{0xe2, byte(b), 0xa6}))
	}
	for _, name := range names {
		got, err := decodeName(encodeName(name))
		if strings.Contains(name, "/") {
			continue // a file cannot have it
		}
		if err != nil || got != name {
			t.Errorf("%q is %q after decoding: %v", name, got, err)
		}
	}
}

// hostileNames are names in a repository that no file can have.
var hostileNames = []string{
	"", ".", "..", "/", "a/b", "../a", "/a", "a\x00b", "\x00",
	"doze-encoded-", "doze-encoded-2e", "doze-encoded-2e2e", "doze-encoded-2f", "doze-encoded-612f62", "doze-encoded-00",
	"doze-encoded-6", "doze-encoded-zz", "doze-encoded-61 ", "doze-encoded-../..",
}

func TestNamesThatNoFileCanHaveAreDamage(t *testing.T) {
	for _, name := range hostileNames {
		if got, err := decodeName(name); !isDamage(err) {
			t.Errorf("%q is decoded as %q: %v", name, got, err)
		}
	}
}

func isDamage(err error) bool { return err != nil && describe(err).Code == wire.Damaged }

// FuzzNames checks that decoding reverses encoding. Two names with the same encoding could not be restored.
func FuzzNames(f *testing.F) {
	for _, name := range append(hostileNames, "a", "\xff", "doze-encoded-61") {
		f.Add(name)
	}
	f.Fuzz(func(t *testing.T, name string) {
		if decoded, err := decodeName(name); err == nil {
			if decoded == "" || decoded == "." || decoded == ".." || strings.ContainsAny(decoded, "/\x00") {
				t.Errorf("%q is decoded as %q", name, decoded)
			}
		}
		if name == "" || name == "." || name == ".." || strings.ContainsAny(name, "/\x00") {
			return
		}
		if got, err := decodeName(encodeName(name)); err != nil || got != name {
			t.Errorf("%q is %q after decoding: %v", name, got, err)
		}
	})
}

func TestModesAreKopiasModes(t *testing.T) {
	for mode := range uint32(0o10000) {
		if got := permissionsOf(modeOf(mode)); got != mode {
			t.Fatalf("the mode %#o is %#o after the conversion", mode, got)
		}
	}
	for mode, want := range map[uint32]os.FileMode{
		unix.S_IFREG | 0o640: 0o640, 0o4755: os.ModeSetuid | 0o755, 0o2755: os.ModeSetgid | 0o755, unix.S_IFDIR | 0o1777: os.ModeSticky | 0o777,
	} {
		if got := modeOf(mode); got != want {
			t.Errorf("the mode %#o is %v, want %v", mode, got, want)
		}
	}
}

func TestTimesThatKopiaStores(t *testing.T) {
	for at, want := range map[string]bool{
		"1970-01-01T00:00:00Z":           true,
		"2262-04-11T23:47:16.854775807Z": true,
		"2262-04-11T23:47:16.854775808Z": false,
		"1677-09-21T00:12:43.145224192Z": true,
		"1677-09-21T00:12:43.145224191Z": false,
		"2446-05-10T22:38:55Z":           false, // the last of ext4
		"1901-12-13T20:45:52Z":           true,  // and its first
		"9999-12-31T23:59:59.999999999Z": false,
	} {
		parsed, err := time.Parse(time.RFC3339Nano, at)
		testkit.NoError(t, "parse", err)
		spec := unix.Timespec{Sec: parsed.Unix(), Nsec: int64(parsed.Nanosecond())}
		if got := storable(spec); got != want {
			t.Errorf("%s can be stored: %t", at, got)
		}
	}
	for _, sec := range []int64{1 << 40, -1 << 40, 1<<63 - 1, -1 << 63} {
		if storable(unix.Timespec{Sec: sec}) {
			t.Errorf("%d seconds can be stored", sec)
		}
	}
}

// The JSON is the format of backups in object stores: it must not change.
func TestDetailsAreJSON(t *testing.T) {
	for _, c := range []struct {
		detail detail
		want   string
	}{
		{detail{}, `{"path":""}`},
		{
			detail{Path: "a/b", Attributes: map[string][]byte{"user.x": []byte("\x00\xff"), "user.empty": {}}, Opaque: true},
			`{"path":"a/b","attributes":{"user.empty":"","user.x":"AP8="},"opaque":true}`,
		},
		{detail{Path: "b", Link: "a"}, `{"path":"b","link":"a"}`},
		{
			detail{Path: "c", Size: 1 << 40, Extents: []tree.Extent{{Offset: 4096, Length: 10}}},
			`{"path":"c","size":1099511627776,"extents":[{"offset":4096,"length":10}]}`,
		},
		{
			detail{Path: "d", Node: &node{Mode: unix.S_IFCHR, UID: 1, GID: 2, Modified: unix.Timespec{Sec: 3, Nsec: 4}}},
			`{"path":"d","node":{"mode":8192,"uid":1,"gid":2,"modified":{"Sec":3,"Nsec":4}}}`,
		},
		{detail{Path: "e", Modified: &unix.Timespec{Sec: 1 << 34}}, `{"path":"e","modified":{"Sec":17179869184,"Nsec":0}}`},
	} {
		text, err := json.Marshal(c.detail)
		testkit.NoError(t, "encode", err)
		testkit.Diff(t, "the JSON", string(text), c.want)
		var back detail
		testkit.NoError(t, "decode", json.Unmarshal(text, &back))
		testkit.Diff(t, "the detail", back, c.detail)
		if got := c.detail.empty(); got != (c.want == `{"path":""}`) {
			t.Errorf("%s is empty: %t", c.want, got)
		}
	}
}
