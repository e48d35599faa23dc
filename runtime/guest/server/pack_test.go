package server

import (
	"archive/tar"
	"bytes"
	"os"
	"testing"
)

func TestNamesOfFilesWithSeveralAreBounded(t *testing.T) {
	dir := t.TempDir()
	for _, file := range []string{"few", "many"} {
		if err := os.WriteFile(dir+"/"+file, nil, 0o644); err != nil {
			t.Fatal(err)
		}
		if err := os.Link(dir+"/"+file, dir+"/"+file+"-again"); err != nil {
			t.Fatal(err)
		}
	}
	var out bytes.Buffer
	p := &packer{ctx: t.Context(), tar: tar.NewWriter(&out), links: map[inode]string{}}
	add := func(file string) byte {
		t.Helper()
		out.Reset()
		if err := p.file(dir+"/"+file, file); err != nil {
			t.Fatal(err)
		}
		return out.Bytes()[156] // the kind of entry
	}
	first := add("few")
	p.names = maxLinkNames - 1
	for _, tt := range []struct {
		file string
		kind byte
	}{{"few-again", tar.TypeLink}, {"many", first}, {"many-again", first}} {
		if kind := add(tt.file); kind != tt.kind {
			t.Errorf("%s is packed as %q, want %q", tt.file, kind, tt.kind)
		}
	}
}
