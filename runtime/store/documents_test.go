package store

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/sandbox/storetest"
	"github.com/doze-run/doze/runtime/store/documentstest"
)

func TestMemoryStoresDocuments(t *testing.T) {
	documentstest.Run(t, func(*testing.T) documentstest.Documents { return NewMemory() })
}

func TestBadgerStoresDocuments(t *testing.T) {
	documentstest.Run(t, func(t *testing.T) documentstest.Documents { return openAt(t, t.TempDir(), defaultTuning) })
}

func TestBadgerStoresDocumentsWhileItsFilesChange(t *testing.T) {
	documentstest.Run(t, func(t *testing.T) documentstest.Documents { return openAt(t, t.TempDir(), small) })
}

func TestDocumentsSurviveReopening(t *testing.T) {
	dir := t.TempDir()
	s := openAt(t, dir, defaultTuning)
	if err := s.PutDocument(t.Context(), "secrets", "owner/token", []byte("sealed")); err != nil {
		t.Fatal(err)
	}
	if err := s.PutSandbox(t.Context(), storetest.Record(1)); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = openAt(t, dir, defaultTuning)
	if got := documentstest.All(t, s, "secrets"); len(got) != 1 || got["owner/token"] != "sealed" {
		t.Errorf("got %q", got)
	}
	if got := storetest.All(t, s); len(got) != 1 {
		t.Errorf("got %d sandboxes in addition to the document, want 1", len(got))
	}
}

func TestDocumentsNeedHeadroom(t *testing.T) {
	s := openAt(t, t.TempDir(), defaultTuning)
	if err := s.PutDocument(t.Context(), "rules", "a", nil); err != nil {
		t.Fatal(err)
	}
	s.reserve.headroom = 1 << 62
	if err := s.PutDocument(t.Context(), "rules", "b", nil); !errors.Is(err, sandbox.ErrStoreFull) {
		t.Errorf("got %v, want ErrStoreFull", err)
	}
	if err := s.DeleteDocument(t.Context(), "rules", "a"); err != nil {
		t.Errorf("delete on a full disk: %v", err)
	}
	s.reserve.headroom = 0
}

func TestDocumentOfAnotherEncodingIsRefused(t *testing.T) {
	m := NewMemory()
	m.documents["d/rules/a"] = []byte{encodingBytes + 1, 'x'}
	err := m.Documents(context.Background(), "rules", func(string, []byte) error { return nil })
	if err == nil || !strings.Contains(err.Error(), `document rules "a"`) || !strings.Contains(err.Error(), "newer doze") {
		t.Errorf("got %v, want an error that names the document and the cause", err)
	}
}
