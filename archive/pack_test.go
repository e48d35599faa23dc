package archive

import (
	"archive/tar"
	"bytes"
	"os"
	"testing"
)

func TestRememberedHardLinksAreBounded(t *testing.T) {
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
	root, err := os.Lstat(dir)
	if err != nil {
		t.Fatal(err)
	}
	p := newPacker(t.Context(), &out, root, PackOptions{})
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

func TestVanishedFilesAreLeftOut(t *testing.T) {
	dir := t.TempDir()
	for _, err := range []error{os.Mkdir(dir+"/folder", 0o755), os.WriteFile(dir+"/file", nil, 0o644), os.Symlink("x", dir+"/link")} {
		if err != nil {
			t.Fatal(err)
		}
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, entry := range entries {
		info, err := entry.Info()
		if err != nil {
			t.Fatal(err)
		}
		path := dir + "/" + entry.Name()
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
		var out bytes.Buffer
		p := newPacker(t.Context(), &out, info, PackOptions{})
		if err := p.add(path, entry.Name(), info); err != nil || out.Len() > 0 {
			t.Errorf("%s: %d bytes, %v", entry.Name(), out.Len(), err)
		}
	}
}
