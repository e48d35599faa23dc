package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"time"

	"github.com/dustin/go-humanize"
	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/cmd/internal/display"
	"github.com/doze-run/doze/cmd/internal/home"
	"github.com/doze-run/doze/cmd/internal/version"
	"github.com/doze-run/doze/node"
	"github.com/doze-run/doze/node/backup"
	"github.com/doze-run/doze/runtime/store"
)

func (a *app) backupCommand() *cobra.Command {
	var address string
	var withoutKey, asJSON bool
	cmd := &cobra.Command{
		Use:   "backup-node FILE|-",
		Short: "Copy the node's own data, while it runs, into one file",
		Long: `Copy the node's own data, while it runs, into one file: records of sandboxes and snapshots,
events, rules, secrets, policies, certificates, the token, and the key that secrets are
encrypted with. The disks of sandboxes and snapshots are not part of it.

The file has mode 0600 and contains the secrets with their key: store it as you would
store them. With --without-key it has neither key nor token; keep the key elsewhere,
because secrets are lost without it.

A file that exists is replaced when the new one is complete. With - the backup is written
to standard output; if the command fails, discard it.

If no node runs, the data in $DOZE_HOME is copied.`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx, stop := interruptible(cmd.Context())
			defer stop()
			folder, err := home.Folder(a.getenv)
			if err != nil {
				return err
			}
			source := backupSource{address: address, home: folder, withoutKey: withoutKey}
			if args[0] == "-" {
				_, err := source.copy(ctx, a.out)
				return err
			}
			contents, err := source.copyToFile(ctx, args[0])
			if err != nil {
				return err
			}
			if asJSON {
				return display.JSON(a.out, contents, "  ")
			}
			info, err := os.Stat(args[0])
			if err != nil {
				return err
			}
			_, err = fmt.Fprintf(a.out, "Backed up node %s to %s (%s)\n", contents.Node, args[0], humanize.IBytes(uint64(info.Size())))
			if err == nil && !contents.SealingKey && !withoutKey {
				fmt.Fprintf(a.err, "doze: the backup has no sealing key, because the node has none in %s; keep the systemd credential doze-seal\n", node.SealingKeyFile(folder))
			}
			return err
		},
	}
	cmd.Flags().StringVar(&address, "address", "", "the node's admin endpoint (default: the socket in $DOZE_HOME)")
	cmd.Flags().BoolVar(&withoutKey, "without-key", false, "omit the sealing key, the API token and Caddy's files")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON, unless FILE is -")
	return cmd
}

// backupSource is where a backup comes from.
type backupSource struct {
	address, home string
	withoutKey    bool
}

// copy writes a backup and verifies it meanwhile.
func (s backupSource) copy(ctx context.Context, w io.Writer) (backup.Contents, error) {
	path := fmt.Sprintf("/doze/backup?without_key=%t", s.withoutKey)
	address := s.address
	if address == "" {
		address = "unix/" + filepath.Join(s.home, "admin.sock")
	}
	response, err := admin{address}.open(ctx, http.MethodGet, path, nil, nil)
	if errors.Is(err, errNoNode) && s.address == "" {
		contents, stopped := s.copyStopped(ctx, w)
		if errors.Is(stopped, store.ErrInUse) {
			return contents, fmt.Errorf("%w; name its admin endpoint by --address: %w", stopped, err)
		}
		return contents, stopped
	}
	if err != nil {
		return backup.Contents{}, err
	}
	defer response.Body.Close()
	return backup.Check(io.TeeReader(response.Body, w))
}

// copyStopped is copy for a node that does not run.
func (s backupSource) copyStopped(ctx context.Context, w io.Writer) (backup.Contents, error) {
	if err := checkOwner(os.Geteuid(), s.home, "backup-node"); err != nil {
		return backup.Contents{}, err
	}
	read, write := io.Pipe()
	written := make(chan error, 1)
	go func() { // ends with Check, which closes the pipe
		err := backup.WriteStopped(ctx, write, backup.Source{Home: s.home, Version: version.String(), WithoutKey: s.withoutKey})
		write.CloseWithError(err)
		written <- err
	}()
	contents, err := backup.Check(io.TeeReader(read, w))
	read.CloseWithError(err)
	if failed := <-written; failed != nil {
		return contents, failed
	}
	return contents, err
}

// copyToFile is copy to a file, which has its name when it is complete and on the disk.
func (s backupSource) copyToFile(ctx context.Context, path string) (contents backup.Contents, err error) {
	switch info, err := os.Lstat(path); {
	case err == nil && !info.Mode().IsRegular():
		return contents, fmt.Errorf("%s is not a regular file; use - to write to standard output", path)
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		return contents, err
	}
	partial, f, err := createPartial(path)
	if err != nil {
		return contents, err
	}
	defer f.Close() // which releases the lock, last
	contents, err = s.copy(ctx, f)
	if err = errors.Join(err, f.Sync()); err == nil {
		err = os.Rename(partial, path)
	}
	if err != nil {
		os.Remove(partial)
		return contents, err
	}
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return contents, err
	}
	return contents, errors.Join(dir.Sync(), dir.Close())
}

// createPartial creates the file that becomes path, or empties the one of a run that was
// killed. Its lock excludes another run.
func createPartial(path string) (partial string, f *os.File, err error) {
	partial = path + ".partial"
	f, err = os.OpenFile(partial, os.O_WRONLY|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return "", nil, err
	}
	err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if err == nil && !names(partial, f) {
		err = unix.EWOULDBLOCK // a run that has just ended renamed it
	}
	if errors.Is(err, unix.EWOULDBLOCK) {
		err = fmt.Errorf("another run of backup-node writes to %s; wait for its end", path)
	}
	if err == nil {
		err = errors.Join(f.Chmod(0o600), f.Truncate(0))
	}
	if err != nil {
		f.Close()
		return "", nil, err
	}
	return partial, f, nil
}

// names reports whether path is the open file.
func names(path string, f *os.File) bool {
	named, err := os.Lstat(path)
	if err != nil {
		return false
	}
	info, err := f.Stat()
	return err == nil && os.SameFile(named, info)
}

func (a *app) restoreCommand() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "restore-node FILE|-",
		Short: "Restore the node's own data from a file of backup-node",
		Long: `Restore the node's own data from a file of backup-node to $DOZE_HOME, where no node runs and
which has no data of a node.

The backup is verified before anything changes, and the node's store gets its place last:
after an interruption repeat the command. A backup of this version of doze or an earlier
one can be restored.

If the backup was made with --without-key, copy the sealing key to egress/seal.key in
$DOZE_HOME, with mode 0600, before the node starts.`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			folder, err := home.Folder(a.getenv)
			if err != nil {
				return err
			}
			if err := checkOwner(os.Geteuid(), folder, "restore-node"); err != nil {
				return err
			}
			file, err := openBackup(args[0])
			if err != nil {
				return err
			}
			defer file.Close()
			contents, err := backup.Restore(file, folder)
			if err != nil {
				return fmt.Errorf("restore %s: %w", args[0], err)
			}
			if asJSON {
				return display.JSON(a.out, contents, "  ")
			}
			if _, err := fmt.Fprintf(a.out, "Restored node %s of %s (doze %s) to %s\n",
				contents.Node, contents.Created.Local().Format(time.DateTime), display.Clean(contents.Version), folder); err != nil {
				return err
			}
			if _, err := os.Stat(node.SealingKeyFile(folder)); errors.Is(err, fs.ErrNotExist) {
				fmt.Fprintf(a.err, "doze: the backup has no sealing key; copy the node's key to %s before you start the node, unless it is the systemd credential doze-seal\n",
					node.SealingKeyFile(folder))
			}
			return nil
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

// openBackup opens a backup. Standard input is copied to a temporary file first, because a
// backup is read twice.
func openBackup(path string) (*os.File, error) {
	if path != "-" {
		return os.Open(path)
	}
	f, err := os.CreateTemp("", "doze-restore-*") // mode 0600
	if err != nil {
		return nil, err
	}
	err = os.Remove(f.Name())
	if err == nil {
		_, err = io.Copy(f, os.Stdin)
	}
	if err == nil {
		_, err = f.Seek(0, io.SeekStart)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}
