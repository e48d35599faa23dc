package types

import "time"

// File is an entry of a directory.
type File struct {
	Name       string    `json:"name" doc:"Last element of the path" example:"app.js"`
	Path       string    `json:"path" doc:"Absolute path" example:"/root/app.js"`
	Type       FileType  `json:"type" doc:"Type of the file"`
	Size       int64     `json:"size" doc:"Size in bytes"`
	Mode       string    `json:"mode" doc:"Permissions in octal" example:"0644"`
	ModifiedAt time.Time `json:"modified_at" doc:"When the content was last modified"`
	Target     string    `json:"target,omitempty" doc:"Target of a symbolic link"`
	UID        uint32    `json:"uid" doc:"User id of the owner in the sandbox"`
	GID        uint32    `json:"gid" doc:"Group id in the sandbox"`
	ETag       string    `json:"etag,omitempty" doc:"ETag of a file, for conditions of reads and writes; after stat and write only. It is weak (W/) if the file was changing"`
	SHA256     string    `json:"sha256,omitempty" doc:"SHA-256 of the content in hexadecimal digits, if requested"`
}

// DigestAlgorithm is an algorithm for digests of files.
type DigestAlgorithm string

const DigestAlgorithmSHA256 DigestAlgorithm = "sha256"

// Values returns all algorithms.
func (DigestAlgorithm) Values() []DigestAlgorithm { return []DigestAlgorithm{DigestAlgorithmSHA256} }

// FileType is the type of a file.
type FileType string

const (
	FileTypeFile      FileType = "file"
	FileTypeDirectory FileType = "directory"
	FileTypeSymlink   FileType = "symlink"
	FileTypeOther     FileType = "other"
)

// Values returns all types.
func (FileType) Values() []FileType {
	return []FileType{FileTypeFile, FileTypeDirectory, FileTypeSymlink, FileTypeOther}
}

// FileList is the content of a directory.
type FileList struct {
	Files     []File `json:"files" nullable:"false" doc:"Entries of the directory"`
	Truncated bool   `json:"truncated" doc:"Whether there were more entries than fit into a response; list subdirectories one by one"`
}

// WriteFileRequest writes a small file, for clients that cannot send raw bytes.
type WriteFileRequest struct {
	Path      string   `json:"path" maxLength:"4096" doc:"Absolute path" example:"/root/app.js"`
	Content   string   `json:"content" doc:"Content of the file"`
	Encoding  Encoding `json:"encoding,omitempty" default:"utf-8" doc:"Encoding of content"`
	CreateNew bool     `json:"create_new,omitempty" doc:"Refuse to replace a file, with path_exists"`
	Mode      string   `json:"mode,omitempty" pattern:"^0?([1-7][0-7]{2}|0[1-7][0-7]|00[1-7])$" patternDescription:"octal permissions such as 0644" doc:"Permissions in octal; default: those of the existing file, or 0644 for a new one" example:"0644"`
}

// MakeDirectoryRequest makes a directory with its parents.
type MakeDirectoryRequest struct {
	Path string `json:"path" maxLength:"4096" doc:"Absolute path" example:"/root/data"`
	Mode string `json:"mode,omitempty" pattern:"^0?([1-7][0-7]{2}|0[1-7][0-7]|00[1-7])$" patternDescription:"octal permissions such as 0755" doc:"Permissions in octal; default: 0755" example:"0755"`
}

// MoveFileRequest renames a file or directory.
type MoveFileRequest struct {
	From string `json:"from" maxLength:"4096" doc:"Absolute path" example:"/root/old.js"`
	To   string `json:"to" maxLength:"4096" doc:"New absolute path; an existing file is replaced, an existing directory is not" example:"/root/new.js"`
}

// FileMatch is a line of a file that matches a search.
type FileMatch struct {
	Path   string `json:"path" doc:"Absolute path of the file"`
	Line   int    `json:"line" doc:"Number of the line, from 1"`
	Column int    `json:"column" doc:"Position of the first match in the line, in bytes, from 1"`
	Text   string `json:"text" doc:"The line, or at most 512 bytes of it with the match"`
}

// SearchStop is what ended a search before it was complete.
type SearchStop string

const (
	SearchStopLimit SearchStop = "limit"
	SearchStopTime  SearchStop = "time"
)

// Values returns all values.
func (SearchStop) Values() []SearchStop { return []SearchStop{SearchStopLimit, SearchStopTime} }

// FileSearch is the result of a search: files, or lines in files.
type FileSearch struct {
	Files   []File      `json:"files" nullable:"false" doc:"Files that match, unless content was requested"`
	Matches []FileMatch `json:"matches" nullable:"false" doc:"Lines that match, if content was requested"`
	Stopped SearchStop  `json:"stopped,omitempty" doc:"Why the search ended early: limit, there are more results; time, it took 20 s. Search a subdirectory, or with more specific patterns"`
}

// FileOperation is what a signed URL does with a file.
type FileOperation string

const (
	FileOperationRead  FileOperation = "read"
	FileOperationWrite FileOperation = "write"
)

// Values returns all operations.
func (FileOperation) Values() []FileOperation {
	return []FileOperation{FileOperationRead, FileOperationWrite}
}

// Disposition is what a browser does with a file that it downloads.
type Disposition string

const (
	DispositionAttachment Disposition = "attachment" // saves it
	DispositionInline     Disposition = "inline"     // displays it
)

// Values returns all values.
func (Disposition) Values() []Disposition {
	return []Disposition{DispositionAttachment, DispositionInline}
}

// SignFileURLRequest describes the signed URL to make.
type SignFileURLRequest struct {
	Path        string        `json:"path" maxLength:"4096" doc:"Absolute path; the file need not exist yet" example:"/srv/shop/report.pdf"`
	Operation   FileOperation `json:"operation,omitempty" default:"read" doc:"Whether the URL reads the file or writes it"`
	ExpiresIn   *Duration     `json:"expires_in,omitempty" doc:"Time until the URL expires, from 1s to 168h; default: 1h" example:"15m"`
	Disposition Disposition   `json:"disposition,omitempty" default:"attachment" doc:"To read: whether browsers save the file or display it"`
	Mode        string        `json:"mode,omitempty" pattern:"^0?([1-7][0-7]{2}|0[1-7][0-7]|00[1-7])$" patternDescription:"octal permissions such as 0644" doc:"To write: permissions in octal; default: those of the existing file, or 0644 for a new one" example:"0644"`
	CreateNew   bool          `json:"create_new,omitempty" doc:"To write: refuse to replace a file"`
	MaxBytes    int64         `json:"max_bytes,omitempty" minimum:"1" doc:"To write: largest file that the URL accepts; default: unlimited" example:"10485760"`
}

// SignedURL is a URL that needs no token.
type SignedURL struct {
	URL       string    `json:"url" format:"uri" doc:"The URL. Its bearer needs no token: treat it as a secret"`
	Method    string    `json:"method" doc:"HTTP method to use; a URL for GET also permits HEAD" example:"PUT"`
	ExpiresAt time.Time `json:"expires_at" doc:"When the URL expires. A transfer that began before goes on"`
}

// ArchiveResult is what was unpacked.
type ArchiveResult struct {
	Files int   `json:"files" doc:"Number of entries of all types"`
	Bytes int64 `json:"bytes" doc:"Number of bytes of file content"`
}
