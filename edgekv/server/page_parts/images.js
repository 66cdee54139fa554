// Images that are dropped, pasted or chosen, made small enough to be sent.

const LONGEST_SIDE = 1024, SMALL_FILE = 200_000;
let attachedImages = [];

async function attach(files) {
  for (const file of files) {
    if (!file.type.startsWith("image/")) continue;
    try { attachedImages.push(await asUrl(file)); }
    catch { $("status").textContent = `${file.name} is no image that this browser can read`; }
  }
  showAttached();
}

async function asUrl(file) {
  const bitmap = await createImageBitmap(file);
  const scale = Math.min(1, LONGEST_SIDE / Math.max(bitmap.width, bitmap.height));
  if (scale === 1 && file.size < SMALL_FILE && ["image/png", "image/jpeg"].includes(file.type))
    return new Promise((resolve, reject) => {
      const reader = new FileReader();
      reader.onload = () => resolve(reader.result);
      reader.onerror = () => reject(reader.error);
      reader.readAsDataURL(file);
    });
  const canvas = element("canvas", {width: Math.round(bitmap.width * scale), height: Math.round(bitmap.height * scale)});
  const context = canvas.getContext("2d");
  context.fillStyle = "white";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", 0.9);
}

function showAttached() {
  $("attached").replaceChildren(...attachedImages.map((url, i) => {
    const remove = element("button", {type: "button", textContent: "×", ariaLabel: `Remove image ${i + 1}`});
    remove.addEventListener("click", () => { attachedImages.splice(i, 1); showAttached(); $("text").focus(); });
    return element("li", {}, element("img", {src: url, alt: `Image ${i + 1}`}), remove);
  }));
}

function takeAttached() {
  const taken = attachedImages;
  attachedImages = [];
  showAttached();
  return taken;
}
