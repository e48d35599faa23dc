package store

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"maps"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"

	"github.com/dgraph-io/badger/v4"
	"github.com/dgraph-io/badger/v4/options"
	"github.com/dgraph-io/badger/v4/table"
	"github.com/dgraph-io/ristretto/v2/z"
)

// Badger opens even a damaged store: it skips a table with a wrong checksum, cuts its log
// at the first wrong byte, and starts empty if its manifest is missing. Acknowledged writes
// are then lost without an error. Therefore every file is read and checked before Badger
// opens the store. That takes 0.04 s for 100 MB.

// DamageError reports that the files of a store are not as a node left them, even a killed
// one.
type DamageError struct {
	Path    string // of the file or folder
	Problem string // the damage, as the predicate of a sentence about Path
	Lost    string // the data that was in it
	Remedy  string // instructions for the operator
}

func (e *DamageError) Error() string {
	return fmt.Sprintf("the store is damaged: %s %s; lost: %s; remedy: %s", e.Path, e.Problem, e.Lost, e.Remedy)
}

// Files of Badger.
const (
	tableSuffix = ".sst" // sorted tables
	logSuffix   = ".mem" // the write-ahead log
	valueSuffix = ".vlog"
	keyRegistry = "KEYREGISTRY"

	logHeader      = 20 // bytes: id of the encryption key, initialization vector
	registryIV     = 16
	registrySanity = "Hello Badger" // follows the IV
)

// remedy describes what the operator can do about a damaged store.
func remedy(dir string) string {
	return fmt.Sprintf("restore a backup of %[1]s; without one, `doze doctor --store %[1]s --reset` moves it aside and creates an empty one, "+
		"and `doze adopt` recovers each sandbox with its files", dir)
}

func damaged(dir, path, lost, problem string, args ...any) *DamageError {
	return &DamageError{Path: path, Problem: fmt.Sprintf(problem, args...), Lost: lost, Remedy: remedy(dir)}
}

// Verify reads and checks all files of the store in dir, and changes nothing. No node may
// have the store open. It returns a *DamageError if a file is damaged, and fs.ErrNotExist
// (wrapped) if there is no store.
func Verify(dir string) error {
	files, err := storeFiles(dir)
	if err != nil {
		return fmt.Errorf("read the store: %w", err)
	}
	if files.empty() {
		return fmt.Errorf("read the store: %s has none: %w", dir, os.ErrNotExist)
	}
	return files.verify()
}

// files lists the names of a store's files by kind.
type files struct {
	dir    string
	byKind map[string][]string
}

func storeFiles(dir string) (files, error) {
	f := files{dir: dir, byKind: map[string][]string{}}
	entries, err := os.ReadDir(dir)
	for _, e := range entries {
		for _, kind := range []string{badger.ManifestFilename, keyRegistry, tableSuffix, logSuffix, valueSuffix} {
			if strings.HasSuffix(e.Name(), kind) {
				f.byKind[kind] = append(f.byKind[kind], e.Name())
			}
		}
	}
	return f, err
}

// empty reports whether there is no store. Badger creates the manifest first.
func (f files) empty() bool { return len(f.byKind) == 0 }

// damaged describes damage to the file with that name.
func (f files) damaged(name, lost, problem string, args ...any) *DamageError {
	return damaged(f.dir, filepath.Join(f.dir, name), lost, problem, args...)
}

func (f files) verify() error {
	manifest, torn, err := f.readManifest()
	if err != nil {
		return err
	}
	var newest uint64                                              // version in the manifest's tables and the logs
	for _, id := range slices.Sorted(maps.Keys(manifest.Tables)) { // so that the first error is always the same
		version, err := f.verifyTable(table.IDToFilename(id))
		if err != nil {
			return err
		}
		newest = max(newest, version)
	}
	for _, name := range f.byKind[logSuffix] {
		version, err := f.verifyLog(name)
		if err != nil {
			return err
		}
		newest = max(newest, version)
	}
	if torn {
		if err := f.verifyOrphans(manifest, newest); err != nil {
			return err
		}
	}
	if err := f.verifyRegistry(); err != nil {
		return err
	}
	return f.verifyValueLogs()
}

// readManifest returns the list of tables. torn reports whether its last entry is
// incomplete, as after a loss of power.
func (f files) readManifest() (m badger.Manifest, torn bool, err error) {
	const lost = "the list of the store's tables, without which none of them can be used"
	if len(f.byKind[badger.ManifestFilename]) == 0 {
		return m, false, f.damaged(badger.ManifestFilename, lost, "is missing")
	}
	file, err := os.Open(filepath.Join(f.dir, badger.ManifestFilename))
	if err != nil {
		return m, false, err
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil {
		return m, false, err
	}
	var end int64
	err = noPanic(func() (err error) {
		m, end, err = badger.ReplayManifestFile(file, 0, badger.DefaultOptions(f.dir))
		return err
	})
	if err != nil {
		return m, false, f.damaged(badger.ManifestFilename, lost, "cannot be read (%v)", err)
	}
	return m, end < info.Size(), nil
}

// verifyTable checks every block of a table and returns its newest version.
func (f files) verifyTable(name string) (version uint64, err error) {
	path := filepath.Join(f.dir, name)
	info, err := os.Stat(path)
	if errors.Is(err, os.ErrNotExist) {
		return 0, f.damaged(name, "records, documents and events", "is missing, although the manifest names it")
	}
	if err != nil {
		return 0, err
	}
	lost := fmt.Sprintf("records, documents and events, some of %d KiB", (info.Size()+1023)>>10)
	if err := checkFooter(path, info.Size()); err != nil {
		return 0, f.damaged(name, lost, "%v", err)
	}
	err = noPanic(func() error {
		file, err := z.OpenMmapFile(path, os.O_RDONLY, 0)
		if err != nil {
			return err
		}
		t, err := table.OpenTable(file, table.Options{ReadOnly: true, ChkMode: options.OnTableAndBlockRead, Compression: options.None})
		if err != nil {
			return err
		}
		version = t.MaxVersion()
		return t.Close(-1)
	})
	if err != nil {
		return 0, f.damaged(name, lost, "has a wrong checksum (%s)", firstLine(err))
	}
	return version, nil
}

// checkFooter checks the lengths at the end of a table. Badger uses them before it has a
// checksum, and ends the process if they are wrong.
//
//	… index | length of index | checksum of index | length of checksum
func checkFooter(path string, size int64) error {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer file.Close()
	const maxChecksum = 64 // bytes; it consists of an algorithm and one integer
	length := func(at int64) (int64, error) {
		var b [4]byte
		if at < 0 {
			return 0, fmt.Errorf("is truncated to %d bytes", size)
		}
		if _, err := file.ReadAt(b[:], at); err != nil {
			return 0, err
		}
		return int64(binary.BigEndian.Uint32(b[:])), nil
	}
	checksum, err := length(size - 4)
	if err != nil {
		return err
	}
	if checksum == 0 || checksum > maxChecksum {
		return fmt.Errorf("is truncated or overwritten at its end (%d bytes)", size)
	}
	index, err := length(size - 4 - checksum - 4)
	if err != nil {
		return err
	}
	if index == 0 || index > size-8-checksum {
		return fmt.Errorf("is truncated or overwritten at its end (%d bytes)", size)
	}
	return nil
}

// verifyOrphans checks the tables that a torn manifest does not list. A killed node leaves
// such tables, but their contents exist in other files as well. Badger removes them.
func (f files) verifyOrphans(m badger.Manifest, newest uint64) error {
	for _, name := range f.byKind[tableSuffix] {
		id, ok := table.ParseFileID(name)
		if _, listed := m.Tables[id]; listed || !ok {
			continue
		}
		version, err := f.verifyTable(name)
		if err != nil {
			continue // half-written
		}
		if version > newest {
			return f.damaged(badger.ManifestFilename, "the newest records, documents and events, which are in "+name, "is truncated")
		}
	}
	return nil
}

// verifyLog checks a write-ahead log. If the node or the machine was stopped, the log may
// end in the middle of an entry, with nothing after it. A loss of power during a sync may
// leave a gap, which cannot be distinguished from damage to acknowledged writes.
func (f files) verifyLog(name string) (newest uint64, err error) {
	path := filepath.Join(f.dir, name)
	data, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	const lost = "the newest records, documents and events"
	if len(data) == 0 {
		return 0, nil // just created or about to be removed
	}
	if len(data) < logHeader {
		return 0, f.damaged(name, lost, "is truncated to %d bytes", len(data))
	}
	if binary.BigEndian.Uint64(data) != 0 { // the store encrypts nothing
		return 0, f.damaged(name, lost, "begins with a header that no node wrote")
	}
	at := logHeader
	for {
		n, version := logEntry(data[at:])
		if n == 0 {
			break
		}
		newest = max(newest, version)
		at += n
	}
	last := len(bytes.TrimRight(data, "\x00"))
	for next := at + 1; next < last; next++ {
		if n, _ := logEntry(data[next:]); n > 0 {
			return 0, f.damaged(name, lost, "has a wrong checksum or a gap at byte %d, and entries after it", at)
		}
	}
	if wasComplete(data, at) {
		return 0, f.damaged(name, lost, "has a wrong checksum at byte %d, in its last entry, which was written to its end", at)
	}
	return newest, nil
}

// wasComplete reports whether the entry at that offset of a log, which logEntry does not
// accept, was written completely and changed afterwards.
//
// A write that a kill or a loss of power interrupted lacks bytes, and the missing bytes are
// zero: the file was zero before, Badger copies an entry into the mapped file from start to
// end, and the kernel writes whole pages, each as it was at some moment of that copy. So
// either the last byte of the entry is zero, or the last byte of one of its pages. A
// complete entry in which that byte happens to be zero is treated as interrupted.
func wasComplete(data []byte, at int) bool {
	const page = 4096
	entry := data[at:]
	if header, n := entryLength(entry); n > 0 && n <= len(entry) && entry[n-1] != 0 {
		for end := (at+header)/page*page + page; ; end += page {
			if end >= at+n {
				return true
			}
			if data[end-1] == 0 {
				break
			}
		}
	}
	// One wrong byte in the lengths makes the entry seem to end elsewhere.
	for i := range min(maxEntryHeader, len(entry)) {
		if (at+i+1)%page == 0 {
			continue // its page may lack only this byte
		}
		before := entry[i]
		for change := 1; change < 256; change++ {
			entry[i] = before ^ byte(change)
			if n, _ := logEntry(entry); n > 0 {
				entry[i] = before
				return true
			}
		}
		entry[i] = before
	}
	return false
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// logEntry returns the length and the version of the entry at the start of data, 0 if there
// is none.
//
//	flags | user flags | length of key | length of value | expiry | key | value | CRC
//
// Lengths and expiry are varints. A key ends with 8 bytes of its version, inverted.
func logEntry(data []byte) (n int, version uint64) {
	header, n := entryLength(data)
	if n == 0 || n > len(data) {
		return 0, 0
	}
	key, _ := binary.Uvarint(data[2:])
	versionAt := header + int(key) - 8
	if !ourKey(data[header:versionAt]) {
		return 0, 0
	}
	checksum := n - crc32.Size
	if crc32.Checksum(data[:checksum], castagnoli) != binary.BigEndian.Uint32(data[checksum:]) {
		return 0, 0
	}
	return n, ^binary.BigEndian.Uint64(data[versionAt:])
}

// maxKey is more than the length of any key of the store, in bytes, with its version.
const maxKey = 1100

// maxEntryHeader is the maximum length of an entry's header, in bytes: flags, lengths of at
// most maxKey and of about a million, and no expiry.
const maxEntryHeader = 2 + 2 + 3 + 1

// entryLength returns the lengths of the header and of the whole entry at the start of data.
// The entry may be longer than data. Both are 0 if the header is not one of the store's.
func entryLength(data []byte) (header, n int) {
	if len(data) < 2 {
		return 0, 0
	}
	header = 2
	var fields [3]uint64 // length of key, length of value, expiry
	for i := range fields {
		v, size := binary.Uvarint(data[header:])
		if size <= 0 {
			return 0, 0
		}
		fields[i] = v
		header += size
	}
	key, value := fields[0], fields[1]
	if key <= 8 || key > maxKey || value > maxRecord+1 {
		return 0, 0
	}
	return header, header + int(key+value) + crc32.Size
}

// ourKey reports whether the store or Badger writes such keys. It avoids the checksum for
// most data that is not an entry.
func ourKey(key []byte) bool {
	return len(key) >= 2 && key[1] == '/' || bytes.HasPrefix(key, []byte("!badger!"))
}

// verifyRegistry checks the list of encryption keys, which is empty.
func (f files) verifyRegistry() error {
	if len(f.byKind[keyRegistry]) == 0 {
		return nil // Badger creates another
	}
	path := filepath.Join(f.dir, keyRegistry)
	data, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if len(data) != registryIV+len(registrySanity) || string(data[registryIV:]) != registrySanity {
		return &DamageError{Path: path, Problem: "was not written by a node", Lost: "nothing: the store encrypts nothing with keys of its own", Remedy: "remove this file"}
	}
	return nil
}

// verifyValueLogs checks that the value logs are empty: all values are in tables.
func (f files) verifyValueLogs() error {
	for _, name := range f.byKind[valueSuffix] {
		path := filepath.Join(f.dir, name)
		data, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		if len(data) == 0 {
			continue // just created or about to be removed
		}
		if len(data) < logHeader || binary.BigEndian.Uint64(data) != 0 || len(bytes.TrimRight(data[logHeader:], "\x00")) > 0 {
			return &DamageError{Path: path, Problem: "is truncated or overwritten", Lost: "nothing: the store keeps no values in this file", Remedy: "remove this file"}
		}
	}
	return nil
}

// noPanic calls f, and returns a panic in Badger, on data that it does not expect, as an
// error.
func noPanic(f func() error) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true)) // of a page that the disk cannot read
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("unreadable: %s", firstLine(r))
		}
	}()
	return f()
}

// firstLine returns the first line of an error or a panic: Badger's have stacks and dumps.
func firstLine(v any) string {
	for line := range strings.Lines(fmt.Sprint(v)) {
		if line = strings.TrimSpace(line); line != "" && !strings.HasPrefix(line, "==") {
			return strconv.Quote(line[:min(len(line), 200)])
		}
	}
	return "no details"
}
