package builtin

import (
	"bytes"
	"errors"
	"strings"
	"testing"
	"testing/fstest"
)

func TestModulesOfEveryPolicyAreBuilt(t *testing.T) {
	for _, name := range Names() {
		wasm, err := Module(name)
		if errors.Is(err, ErrNotBuilt) {
			t.Fatal("run `make policies` first")
		}
		if err != nil {
			t.Error(err)
			continue
		}
		if !bytes.HasPrefix(wasm, []byte("\x00asm\x01\x00\x00\x00")) {
			t.Errorf("%s begins with %q", name, wasm[:8])
		}
		// Compiling takes time by size. Twice that is encoding/json, net/http or fmt.
		if limit := 4 << 20; len(wasm) > limit {
			t.Errorf("%s has %d bytes, more than %d: check its imports", name, len(wasm), limit)
		}
	}
}

func TestMissingModulesAreReported(t *testing.T) {
	if _, err := module(fstest.MapFS{}, "bearer"); !errors.Is(err, ErrNotBuilt) || !strings.Contains(err.Error(), "make build") {
		t.Errorf("got %v", err)
	}
}

func TestTheErrorOfAnUnknownNameListsTheExistingOnes(t *testing.T) {
	if _, err := Module("../bearer"); !errors.Is(err, ErrUnknown) || !strings.Contains(err.Error(), "aws-sigv4, basic") {
		t.Errorf("got %v", err)
	}
}

func TestADamagedModuleIsAnError(t *testing.T) {
	for _, data := range []string{"", "no gzip", "\x1f\x8b\x08"} {
		from := fstest.MapFS{"modules/bearer.wasm.gz": {Data: []byte(data)}}
		if _, err := module(from, "bearer"); err == nil || errors.Is(err, ErrNotBuilt) {
			t.Errorf("%q: got %v", data, err)
		}
	}
}
